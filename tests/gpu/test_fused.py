"""The Triton kernels as they are compiled, and that their gradients are written in place."""

from __future__ import annotations

import pytest

from tests.patches.vocab_parallel.test_fused import hold


@pytest.mark.parametrize("number", [1, 2])
def test_against_float64(number):
    reports = list(hold("cuda", number))
    assert len(reports) == number
    assert all(set(report["counted"]) == {"backward in place"} for report in reports)
