"""``deepspeed-muon-lost-momentum``: steps of real ZeRO-1 and 2 (its proof's worker), against Muon's definition."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlhf_patches.patches.deepspeed import muon_lost_momentum
from rlhf_patches.patches.deepspeed._muon_conditions import keeps_one_momentum
from rlhf_patches.patches.deepspeed.proofs import muon_lost_momentum_ranks
from tests.harness.forkserver import beside

WORKER = muon_lost_momentum_ranks.__name__
WRONG = ("stage 1", "stage 2", "padded")
# Newton-Schulz runs in float32 on these CPUs: seen 4e-6.
ROUNDING = 1e-3
RULE_COVERAGE = {
    "minimal scope": "test_zero_3_is_as_released",
    "no side effects": "because a buffer that the release makes itself is read in place of a copy that it makes of it",
    "backward compatible": ("test_zero_3_is_as_released", "test_a_user_s_function_is_called_for_each_matrix"),
    "no new blocking": "because a copy is left out; no lock, no collective",
    "known": "test_a_user_s_function_is_called_for_each_matrix",
    "ZeRO-3, and training without ZeRO are not affected": (
        "test_zero_3_is_as_released",
        "test_which_runs_meet_it",
    ),
    "A step that overflows still leaves": "because upstream's own step decides whether the second buffer is kept",
    "A `_muon_staging_momentum` of your own": "test_a_user_s_function_is_called_for_each_matrix",
}


@pytest.fixture(scope="module", params=[1, 2])
def reports(request, run_ranks):
    levels = beside("deepspeed-0.19.7", "deepspeed")
    found = run_ranks(WORKER, *WRONG, *(["stage 3"] if request.param == 1 else []), levels=levels, ranks=request.param)
    assert {each["status"] for each in found} == {"applied"}
    return found


@pytest.mark.parametrize("case", WRONG)
def test_momentum_is_that_of_all_steps(reports, case):
    for report in reports:
        assert min(report[state][case]["error"] for state in ("before", "reverted")) > 0.1
        assert report["after"][case]["error"] < ROUNDING


def test_zero_3_is_as_released(reports):
    report = reports[0]
    if "stage 3" in report["after"]:
        assert report["after"]["stage 3"] == report["before"]["stage 3"]


@pytest.mark.parametrize("release", ["deepspeed-0.18.9", None])
def test_other_releases_are_left_alone(run_ranks, release):
    (found,) = run_ranks(WORKER, "stage 1", levels=beside(release, "deepspeed"), ranks=1)
    assert found["status"] == "unaffected"
    assert found["after"] == found["before"]
    assert found["before"]["stage 1"]["error"] < 0.12


def optimizer():
    """DeepSpeed's, as far as it stages a momentum."""
    written = {"__name__": "deepspeed.runtime.zero.stage_1_and_2"}
    exec(
        "class DeepSpeedZeroOptimizer:\n"
        "    def _is_muon_group(self, tensors): return tensors[0].use_muon\n"
        "    def _muon_staging_momentum(self, flat, index):\n"
        "        self._muon_pending_momentum[index] = ([flat], flat)\n"
        "        return self._muon_pending_momentum[index][0]\n",
        written,
    )
    made = written["DeepSpeedZeroOptimizer"]()
    made._muon_pending_momentum = {}
    return made


def test_a_user_s_function_is_called_for_each_matrix():
    made, called = optimizer(), []
    first = muon_lost_momentum.staged(made, "flat", 0, 0)
    assert muon_lost_momentum.staged(made, "flat", 0, 6) is first
    assert muon_lost_momentum.staged(made, "flat", 0, 0) is not first  # the next step
    made._muon_staging_momentum = lambda flat, index: called.append(index)
    muon_lost_momentum.staged(made, "flat", 0, 6)
    assert called == [0]


def test_which_runs_meet_it():
    made, matrix, other = optimizer(), SimpleNamespace(use_muon=True), SimpleNamespace(use_muon=False)
    assert [keeps_one_momentum(made, each) for each in ([matrix] * 2, [matrix], [other] * 2, [])] == [
        True,
        False,
        False,
        False,
    ]
    made._muon_staging_momentum = lambda flat, index: None
    assert keeps_one_momentum(made, [matrix] * 2) is None
