"""`rehearse` of right runs in bf16 on the GPU: no relation deviates."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import ranks


def test_right_runs_in_bf16_do_not_deviate():
    pytest.importorskip("trl")
    (rank,) = ranks.run(Path(__file__).with_name("rehearse_rank.py"), ranks=1)
    assert rank.status == 0, rank.errors
    for kind, rows in rank.said.items():
        assert [row for row in rows if row["verdict"] == "deviates"] == []
        held = {row["relation"] for row in rows if row["verdict"] == "holds"}
        assert {"micro-batch weights", "duplicated micro-batch"} <= held, (kind, rows)
