"""megatron-core-duplicated-norm on megatron-core's optimizer and TransformerEngine's real layers, two ranks.

The norm is held against float64 over the whole model. Tolerance: float32, some 200 squares.
"""

from __future__ import annotations

import pytest

from tests.harness import look_alikes
from tests.harness.forkserver import megatron_with_transformer_engine

WORKER = "tests.patches.megatron_core.transformer_engine_norms_ranks"
PATCH = "megatron-core-duplicated-norm"
FLOAT32 = 1e-6
RULE_COVERAGE = {
    "minimal scope": "test_each_weight_counts_once",  # data parallelism alone
    "no side effects": "because it marks a parameter while its layer is made, as Megatron does two lines before",
    "backward compatible": "test_each_weight_counts_once",
    "known": "test_adapters_of_mcore_bridge_are_those_that_were_saved",
    "no new blocking": "because it sets an attribute; no lock, no collective",
    "does not change a layer that is divided": "test_each_weight_counts_once",
    "only the logged value changes": "because Megatron scales gradients only where the norm is above `clip_grad`",
}


@pytest.fixture(scope="module")
def reports(run_ranks):
    return run_ranks(WORKER, "--patch", PATCH, levels=megatron_with_transformer_engine("2.13"), ranks=2)


@pytest.mark.parametrize("layout", ["TP 2", "TP 2, EP 2", "DP 2"])
@pytest.mark.parametrize("distributed", [False, True])
def test_each_weight_counts_once(reports, layout, distributed):
    for report in reports:
        assert report["status"] == "applied"
        assert 0 < report["reached"]["held"] < report["reached"]["asked"] == report["reached"]["calls"]
        name = f"{layout}{', distributed' * distributed}"
        before, after, reverted = (report[state][name] for state in ("before", "after", "reverted"))
        assert after["norm"] == pytest.approx(after["exact"], rel=FLOAT32)
        assert after.get("off", 0.0) < FLOAT32  # the weights after a step that was clipped
        if layout != "DP 2":
            assert before["norm"] > 1.05 * before["exact"]
            assert distributed or before["off"] > 5e-4
        else:
            assert before == after
        assert reverted == before


def test_adapters_of_mcore_bridge_are_those_that_were_saved(reports):
    """It tells by the mark of a layer whether its adapter is divided: `B` has TP times the rows then, in all."""
    for report in reports:
        for layout in ("TP 2", "TP 2, EP 2"):
            adapters = report["after"][layout]["adapters"]
            assert adapters == report["before"][layout]["adapters"]
            assert adapters["adapted.lora_B.default"] == "TEColumnParallelLinear"


@pytest.mark.parametrize(("version", "status"), [(None, "refused"), ("0.17.0", "unaffected")])
def test_it_keeps_away(tmp_path, version, status):
    """From what 0.17.0 has made of it."""

    def edit(text: str) -> str:
        assert text.count('setattr(param, "sequence_parallel", self.config.sequence_parallel)') == 1
        return text.replace(
            'setattr(param, "sequence_parallel", self.config.sequence_parallel)',
            "param.sequence_parallel = self.config.sequence_parallel; param.tensor_model_parallel = False",
        )

    row = look_alikes.doctor_row(tmp_path, PATCH, version=version, edit=edit)
    assert row["status"] == status, row
