"""megatron-core's own layers on the GPU, without TransformerEngine: patches leave a step that has no bug as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import ranks


def test_a_step_is_as_released():
    pytest.importorskip("megatron.core")
    (rank,) = ranks.run(Path(__file__).with_name("megatron_rank.py"), ranks=1)
    assert rank.status == 0, rank.errors
    for case, found in rank.said.items():
        assert "megatron-core-cross-entropy-in-place" in found["applied"]
        assert found["norm"] > 0
        # float32's rounding, in another order; bfloat16's for the gradient of the logits, which is rounded to it.
        bound = 1e-5 if "float32" in case else 2e-2
        for loss, gradient in found["off"]:
            assert loss < bound, (case, found)
            assert gradient < bound, (case, found)
