"""``skyrl-resume-epoch`` on SkyRL's real trainer, loader and checkpoint (resume_epoch_ranks.py)."""

from __future__ import annotations

import pytest

from rlhf_patches.patches.skyrl.proofs import resume_epoch_ranks
from tests.harness import side_by_side
from tests.harness.by_case import exhaustive_but
from tests.harness.forkserver import Level, skyrl_trainer

RULE_COVERAGE = {
    "minimal scope": "test_what_is_unknown_stays_as_released",
    "no side effects": "because it reads the loader's state and the settings, and gives a number",
    "backward compatible": "test_what_is_unknown_stays_as_released",
    "no new blocking": "because it computes on the trainer's own process's numbers; no lock, no collective",
    "known": "test_what_is_unknown_stays_as_released",
    "are not affected": ("test_other_steps_are_as_released", "test_what_is_unknown_stays_as_released"),
}
WORKER = resume_epoch_ranks.__name__
ENDS = ("at an epoch's end", "of worker processes")
RELEASES = exhaustive_but(["0.4", "0.1", "0.2", "0.3"], "0.4")


@pytest.fixture(scope="module", params=RELEASES)
def report(run_ranks, request):
    torchdata = Level("tests.harness.loading:torchdata", str(side_by_side.folder("verl-worker")))
    levels = (*skyrl_trainer(request.param), torchdata)
    (found,) = run_ranks(WORKER, levels=levels, ranks=1, TORCHDYNAMO_DISABLE="1")
    assert (found["version"], found["status"]) == (f"{request.param}.0", "applied")
    return found


def each_once(batches):
    samples = [sample for batch in batches for sample in batch]
    return len(samples) == len(set(samples)) == 16


def test_an_epoch_has_each_sample_once(report):
    batches = report["after"]["batches"]
    assert each_once(batches[:4])
    assert each_once(batches[4:])
    assert batches == report["before"]["batches"]


@pytest.mark.parametrize("case", ENDS)
def test_the_resumed_run_trains_the_next_epoch(report, case):
    """It is the last one; in the order that it has after a resume in the epoch before, if the loader is the same."""
    assert report["before"][case] is report["reverted"][case] is None
    assert each_once(report["after"][case])
    assert report["after"][case] != report["after"]["batches"][:4]
    after = report["after"]["batches of a resumed run"]
    assert after[:3] == report["after"]["batches"][1:4]
    if case == "at an epoch's end":
        assert report["after"][case] == after[3:]


@pytest.mark.parametrize("case", ["from the start", "before an epoch's end", "after an epoch's end"])
def test_other_steps_are_as_released(report, case):
    step, batches = resume_epoch_ranks.CASES[case]["step"], report["before"]["batches"]
    assert report["before"][case] == report["after"][case] == batches[step : 4 if step < 4 else 8]


@pytest.mark.parametrize(
    "case",
    [
        *("without a state", "dynamic sampling", "other batches", "after the epoch's end was seen"),
        *("own sampler", "finished", "no step left"),
    ],
)
def test_what_is_unknown_stays_as_released(report, case):
    assert report["before"][case] == report["after"][case] == report["reverted"][case]
    if case == "after the epoch's end was seen":
        assert each_once(report["before"][case])
    for state in ("after", "reverted"):
        assert report[state]["callbacks"][case] == report["before"]["callbacks"][case]


def test_it_reports_the_runs_that_would_leave_an_epoch_out(report):
    calls = len(resume_epoch_ranks.CASES)
    assert report["reached"] == {"calls": calls, "asked": calls - 2, "held": len(ENDS)}
