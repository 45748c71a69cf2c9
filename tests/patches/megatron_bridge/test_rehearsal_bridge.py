"""Rehearsals of Megatron-Bridge's training step on two ranks."""

from __future__ import annotations

import pytest

from tests.harness.forkserver import MEGATRON, Level

WORKER = "tests.patches.megatron_bridge.rehearsal_ranks"
LEVELS = (*MEGATRON, Level("tests.harness.loading:megatron_bridge_trainer"))
COPIES, WEIGHTS, NORM = "copies of a micro-batch", "micro-batch weights", "gradient norm"


@pytest.mark.exhaustive
def test_a_step_of_megatron_bridge(run_ranks):
    """As its recipes train: a loss per token, or a mean over micro-batches; losses are validated."""
    cases = {
        "DP": ("holds", "[0.365 0.327 0.308]"),
        "DP, means": ("holds", "[0.333 0.333 0.333]"),
        "DP, clears": ("deviates", "[0.000 0.000 0.308]"),
        "TP": ("holds", "[0.407 0.333 0.259]"),
    }
    found, _ = run_ranks(WORKER, *cases, levels=LEVELS, ranks=2, TORCHDYNAMO_DISABLE="1")
    for case, weights in cases.items():
        rows = {row["relation"]: (row["verdict"], row["measured"]) for row in found[case]["relations"]}
        wrong = {name for name, (verdict, _) in rows.items() if verdict == "deviates"}
        assert wrong == ({COPIES, WEIGHTS} if "clears" in case else set()), case
        assert found[case]["status"] == (1 if wrong else 0)
        assert rows[WEIGHTS] == weights, case
        assert rows[NORM] == ("holds", "1.000 x")
        unchecked = {name for name, (verdict, _) in rows.items() if verdict == "not checked"}
        assert unchecked == {"gradient across ranks"}, case
