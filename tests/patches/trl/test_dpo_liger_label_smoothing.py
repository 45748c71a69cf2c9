"""``trl-dpo-liger-label-smoothing``: what it says is so, in TRL before 0.29 (dpo_liger_settings_ranks.py)."""

from __future__ import annotations

import os

import pytest

from rlhf_patches.patches.trl.dpo_liger_label_smoothing import ADVICE
from tests.harness import side_by_side, unpacked
from tests.harness.forkserver import Level

RULE_COVERAGE = {
    "minimal scope": "because nothing is applied: an advice",
    "no side effects": "because nothing is applied: an advice",
    "backward compatible": "test_with_liger_there_is_no_smoothing_and_without_it_there_is",
    "no new blocking": "because nothing is applied: an advice",
}
WORKER = "rlhf_patches.patches.trl.proofs.dpo_liger_settings_ranks"
#: Everything is in float64 but for one factor of Liger's; seen are 2e-7.
TOLERANCE = 1e-6
CASES = ("sigmoid", "sigmoid, without Liger", "robust")
LIGER = Level("tests.harness.loading:torch_and_interpreter", str(side_by_side.folder("liger-0.8")))


@pytest.mark.parametrize("version", ["0.24.0", pytest.param("0.21.0", marks=pytest.mark.exhaustive)])
def test_with_liger_there_is_no_smoothing_and_without_it_there_is(run_ranks, version):
    """With Liger the gradient is that of no smoothing; without, which is what is advised, it is cDPO's."""
    folders = [unpacked.folders(f"trl=={version}"), str(side_by_side.folder("transformers-4.57"))]
    levels = (LIGER, Level("tests.harness.loading:trl_kto_with_liger", os.pathsep.join(folders)))
    (found,) = run_ranks(WORKER, *CASES, levels=levels, ranks=1)
    assert found[ADVICE.name] == [version, "advice"]
    assert found["before"] == found["after"], "nothing is changed"
    assert found["before"]["sigmoid"]["error"] > 0.3
    assert found["before"]["sigmoid"]["error of none"] < TOLERANCE
    assert found["before"]["sigmoid, without Liger"]["error"] < TOLERANCE
    assert "use_liger_loss" in found["before"]["robust"]["refused"], "other types that smooth"
    assert found["reached by the advice"] == {"calls": 3, "asked": 3, "held": 1}, "of sigmoid with Liger alone"
    (line,) = found["said"]
    assert line.startswith(f"{ADVICE.name}: the bug occurs in this run, without a repair; ")


@pytest.mark.exhaustive
def test_what_comes_after(run_ranks):
    """From 0.29.0 on `sigmoid` has no smoothing, with Liger or without; `robust` has, without."""
    cases = ("sigmoid", "sigmoid, without Liger", "robust, without Liger")
    levels = (LIGER, Level("tests.harness.loading:trl_kto_with_liger", unpacked.folders("trl==1.12.0")))
    (found,) = run_ranks(WORKER, *cases, levels=levels, ranks=1)
    assert found[ADVICE.name] == ["1.12.0", "unaffected"]
    for case in cases[:2]:
        assert found["before"][case]["error"] > 0.3
        assert found["before"][case]["error of none"] < TOLERANCE
    assert found["before"]["robust, without Liger"]["error"] < TOLERANCE
