"""megatron-core-duplicated-norm on megatron-core's optimizer and TransformerEngine's real layers, two ranks.

The norm is held against float64 over the whole model. Tolerance: float32, some 200 squares.
"""

from __future__ import annotations

import pytest

from tests.harness import look_alikes
from tests.harness.by_case import exhaustive_but
from tests.harness.forkserver import Level, megatron_with_transformer_engine

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


ALL = [f"{distributed}-{layout}" for distributed in (False, True) for layout in ("TP 2", "TP 2, EP 2", "DP 2")]
"""Whether the optimizer is distributed, and the layout."""
CORE = [*ALL[:3], "True-TP 2"]


def name_of(case):
    """The worker's."""
    distributed, _, layout = case.partition("-")
    return f"{layout}, distributed" if distributed == "True" else layout


@pytest.fixture(scope="module")
def reports(run_ranks):
    def run(cases=CORE):
        levels = (*megatron_with_transformer_engine("2.13"), Level("tests.harness.loading:mcore_bridge_adapters"))
        reports = run_ranks(WORKER, "--patch", PATCH, *map(name_of, cases), levels=levels, ranks=2)
        for report in reports:
            first = name_of(cases[0])
            assert report["reverted"] == {first: report["before"][first]}
        return reports

    return run


@pytest.mark.parametrize("case", exhaustive_but(ALL, *CORE))
def test_each_weight_counts_once(reports, case):
    rest = [other for other in ALL if other not in CORE]
    for report in reports(CORE if case in CORE else rest):
        assert report["status"] == "applied"
        assert 0 < report["reached"]["held"] < report["reached"]["asked"] == report["reached"]["calls"]
        before, after = (report[state][name_of(case)] for state in ("before", "after"))
        assert after["norm"] == pytest.approx(after["exact"], rel=FLOAT32)
        assert after.get("off", 0.0) < FLOAT32  # the weights after a step that was clipped
        if not case.endswith("DP 2"):
            assert before["norm"] > 1.05 * before["exact"]
            assert case.startswith("True") or before["off"] > 5e-4
        else:
            assert before == after


def test_adapters_of_mcore_bridge_are_those_that_were_saved(reports):
    """It tells by the mark of a layer whether its adapter is divided: `B` has TP times the rows then, in all."""
    for report in reports():
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
