"""megatron-core-grouped-experts-norm on megatron-core's optimizer and TransformerEngine's real layers, two ranks.

The norm is held against float64 over the whole model. Tolerance: float32, some 3000 squares.
"""

from __future__ import annotations

import pytest

from tests.harness.forkserver import megatron_with_transformer_engine

WORKER = "tests.patches.megatron_core.transformer_engine_norms_ranks"
PATCH = "megatron-core-grouped-experts-norm"
FLOAT32 = 1e-6
RULE_COVERAGE = {
    "minimal scope": "test_all_experts_count",  # layouts that have no such experts
    "no side effects": "because it marks a parameter while its layer is made, as TransformerEngine did",
    "backward compatible": "test_all_experts_count",
    "known": "test_all_experts_count",
    "no new blocking": "because it sets attributes; no lock, no collective",
    "does not change a layer": "test_all_experts_count",
    "does not change a subclass": "test_all_experts_count",
    "only the logged value changes": "because Megatron scales gradients only where the norm is above `clip_grad`",
}


@pytest.fixture(scope="module")
def of_release(run_ranks):
    def run(release):
        return run_ranks(WORKER, "--patch", PATCH, levels=megatron_with_transformer_engine(release), ranks=2)

    return run


@pytest.mark.parametrize("layout", ["TP 2", "TP 2, EP 2", "TP 2, experts whole", "EP 2", "DP 2"])
@pytest.mark.parametrize("distributed", [False, True])
def test_all_experts_count(of_release, layout, distributed):
    for report in of_release("2.13"):
        assert report["status"] == "applied"
        assert 0 < report["reached"]["held"] < report["reached"]["asked"]
        assert report["reached"]["asked"] == report["reached"]["calls"] - 1, "not told of the user's class"
        name = f"{layout}{', distributed' * distributed}"
        before, after, reverted = (report[state][name] for state in ("before", "after", "reverted"))
        assert after["norm"] == pytest.approx(after["exact"], rel=FLOAT32)
        assert after.get("off", 0.0) < FLOAT32  # the weights after a step that was clipped
        if layout in ("TP 2", "TP 2, EP 2"):
            assert before["norm"] < 0.8 * before["exact"]
            assert distributed or before["off"] > 1e-3
        else:
            assert before == after
        assert reverted == before


def test_a_class_of_a_user_s_that_marks_its_experts(of_release):
    """The obvious workaround, as Megatron marks its own: it requires that nothing has."""
    for report in of_release("2.13"):
        found = report["after"]["a user's"]["marks"]
        assert found == report["before"]["a user's"]["marks"]
        assert all(marks["tensor_model_parallel"] is True for marks in found.values())


@pytest.mark.exhaustive
def test_transformer_engine_that_marks_its_weights(of_release):
    """2.11 is beside nothing to repair; of experts with biases, it has missed those alone."""
    for report in of_release("2.11"):
        assert report["status"] == "unaffected"
        assert report["before"] == report["after"] == report["reverted"]
        assert report["before"]["TP 2"]["norm"] == pytest.approx(report["before"]["TP 2"]["exact"], rel=FLOAT32)
        assert 0.9 < report["before"]["TP 2, EP 2"]["norm"] / report["before"]["TP 2, EP 2"]["exact"] < 0.999
