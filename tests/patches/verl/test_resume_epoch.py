"""``verl-resume-epoch`` on verl's real trainers, loaders and checkpoints (two workers resume_epoch_ranks.py)."""

from __future__ import annotations

import pytest

from rlhf_patches.patches.verl.proofs import resume_epoch_ranks
from tests.harness.by_case import exhaustive_but
from tests.harness.forkserver import verl_sft

RULE_COVERAGE = {
    "minimal scope": "test_what_is_unknown_stays_as_released",
    "no side effects": "because it reads the loader's state, and gives a number",
    "backward compatible": "test_what_is_unknown_stays_as_released",
    "no new blocking": "because it computes on one process's numbers; no lock, no collective",
    "are not affected": ("test_other_steps_are_as_released", "test_what_is_unknown_stays_as_released"),
    "known": "test_a_sampler_of_ones_own_stays_as_released",
}
WORKER = resume_epoch_ranks.__name__
OTHERS = "tests.patches.verl.resume_epoch_ranks"
ENDS = ("at an epoch's end", "at the last epoch")
STEPS = resume_epoch_ranks.EPOCHS * resume_epoch_ranks.BATCHES


def levels_of(release):
    return verl_sft(None if release == "0.9" else release)


@pytest.fixture(
    scope="module",
    params=exhaustive_but([("0.9", 1), ("0.9", 2), ("0.8", 1), ("0.7", 2)], ("0.9", 2)),
    ids=lambda param: "verl {}, ranks: {}".format(*param),
)
def reports(run_ranks, request):
    release, ranks = request.param
    found = run_ranks(WORKER, levels=levels_of(release), ranks=ranks, TORCHDYNAMO_DISABLE="1")
    for report in found:
        assert (report["status"], report["version"][: len(release)]) == ("applied", release)
    return found


def test_without_an_interruption_each_epoch_has_each_sample_once(reports):
    """As many as fill batches; all ranks together."""
    for state in ("before", "after"):
        runs = [report[state]["uninterrupted"] for report in reports]
        for epoch in range(resume_epoch_ranks.EPOCHS):
            seen = [sample for run in runs for step in run if step[0] == epoch for sample in step[1:]]
            assert len(seen) == len(set(seen)) == 16
    assert all(report["before"]["uninterrupted"] == report["after"]["uninterrupted"] for report in reports)


@pytest.mark.parametrize("cut", ENDS)
def test_the_resumed_run_has_the_rest_of_an_uninterrupted_one(reports, cut):
    step = resume_epoch_ranks.CUTS[cut]
    for report in reports:
        whole = report["before"]["uninterrupted"]
        assert len(whole) == STEPS
        for state in ("before", "reverted"):
            assert report[state][cut]["resumed"] == whole[step + 4 :], "an epoch is left out"
        assert report["after"][cut] == {"first": whole[:step], "resumed": whole[step:]}


def test_other_steps_are_as_released(reports):
    for report in reports:
        whole = report["before"]["uninterrupted"]
        for cut, step in resume_epoch_ranks.CUTS.items():
            if cut not in ENDS:
                assert report["before"][cut] == report["after"][cut] == {"first": whole[:step], "resumed": whole[step:]}


def test_it_reports_the_runs_that_would_leave_an_epoch_out(reports):
    calls = 1 + 2 * len(resume_epoch_ranks.CUTS)
    for report in reports:
        assert report["reached"] == {"calls": calls, "asked": calls, "held": len(ENDS)}


def of(run_ranks, trainer, levels, release):
    (report,) = run_ranks(OTHERS, "--trainer", trainer, levels=levels, ranks=1, TORCHDYNAMO_DISABLE="1")
    assert (report["status"], report["version"][: len(release)]) == ("applied", release)
    return report


def test_what_is_unknown_stays_as_released(run_ranks):
    report = of(run_ranks, "left alone", levels_of("0.9"), "0.9")
    for name, resumed in report["before"].items():
        assert report["after"][name] == resumed, name
    counts = {"no state": 8, "own loader": 4, "not resumed": 12, "finished": 0, "no step left": 0}
    assert {name: len(report["after"][name]) for name in counts} == counts
    assert report["reached"]["held"] == 0


def test_a_sampler_of_ones_own_stays_as_released(run_ranks):
    report = of(run_ranks, "own sampler", levels_of("0.8"), "0.8")
    assert report["before"] == report["after"] == report["reverted"]
    assert report["after"]["epoch"] == 1
    assert len(report["after"]["batch"]) == 4
    assert report["reached"]["held"] == 0


@pytest.mark.parametrize(
    "case",
    exhaustive_but(
        [
            *(("sft_trainer_ray", release) for release in ("0.9", "0.8", "0.7", "0.7.0")),
            *(("fsdp_sft_trainer", release) for release in ("0.7.0", "0.6")),
        ],
        ("sft_trainer_ray", "0.9"),
    ),
    ids=" of verl ".join,
)
def test_the_other_trainers_for_supervised_fine_tuning(run_ranks, case):
    trainer, release = case
    report = of(run_ranks, trainer, levels_of(release), release)
    for state in ("before", "after", "reverted"):
        whole = report[state]["uninterrupted"]
        assert report[state]["first"] == whole[:4]
        assert report[state]["resumed"] == whole[4 if state == "after" else 8 :]


@pytest.mark.parametrize(
    "case",
    exhaustive_but(
        [("RayPPOTrainer", "0.7"), ("RayPPOTrainer", "0.7.0"), ("PPOTrainer", "0.8")], ("PPOTrainer", "0.8")
    ),
    ids=" of verl ".join,
)
def test_ppo_in_the_releases_that_have_it(run_ranks, case):
    trainer, release = case
    report = of(run_ranks, trainer, levels_of(release), release)
    for state in ("before", "after", "reverted"):
        found = report[state]
        for step in (0, 3, 5):
            assert found[str(step)] == found["batches"][step]
        assert found["4"] == (found["batches"][4] if state == "after" else None), "nothing is trained"


@pytest.mark.parametrize("release", [pytest.param("0.8", marks=pytest.mark.exhaustive), "0.9"])
def test_ppo_afterwards_trains_the_epoch_in_the_first_ones_order(run_ranks, release):
    report = of(run_ranks, "RayPPOTrainer", levels_of(release), release)
    assert report["before"] == report["after"] == report["reverted"]
    assert report["after"]["4"] == report["after"]["batches"][0]
    assert report["after"]["5"] == report["after"]["batches"][5]
