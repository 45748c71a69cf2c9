"""``trl-continuous-batching-weights`` where Online DPO has the setting, too, in 0.23.0 to 1.1.0."""

from __future__ import annotations

import pytest

from tests.harness.forkserver import beside

WORKER = "tests.patches.trl.continuous_batching_weights_ranks"


@pytest.fixture(scope="module")
def report(run_ranks):
    cases = ("--alone", "Online DPO", "Online DPO, regular")
    (found,) = run_ranks(WORKER, *cases, levels=beside("trl-0.27", "trl_dpo"), ranks=1, ACCELERATE_USE_CPU="true")
    assert (found["version"], found["status"]) == ("0.27.1", "applied")
    return found


def test_updates_are_those_of_float64(report):
    before, after = (report[state]["Online DPO"] for state in ("before", "after"))
    assert after["error"] < 0.01 < 10 < before["error"]
    assert (before["weights"], after["weights"]) == (["torch.bfloat16"], ["torch.float32"])


def test_all_weights_are_those_of_trl_s_other_generation(report):
    assert report["after"]["Online DPO"]["found"] == report["before"]["Online DPO, regular"]["found"]
    assert report["reached"]["held"] > 0


def test_reverted_it_is_trl_s_own_again(report):
    assert report["reverted"]["Online DPO"] == report["before"]["Online DPO"]
