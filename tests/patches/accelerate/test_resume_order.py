"""``accelerate-resume-order``: what is left of an epoch after a resume is what a run without a stop gets of it.

resume_order_ranks.py resumes loops of all kinds of loaders, and transformers 4's own Trainer, in each of four epochs.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlhf_patches.patches.accelerate.resume_order import of_its_epoch
from tests.harness.forkserver import TORCH, Level
from tests.harness.side_by_side import folder

RULE_COVERAGE = {
    "minimal scope": "test_only_a_new_loader_of_a_later_epoch_is_told",
    "no side effects": "test_the_loader_that_was_given_is_left_alone",
    "backward compatible": ("test_what_was_right_is_the_same", "test_only_a_new_loader_of_a_later_epoch_is_told"),
    "no new blocking": "because it sets one number of one rank's loader; no lock, no collective",
    "nothing changes": "test_only_a_new_loader_of_a_later_epoch_is_told",
}
WORKER = "rlhf_patches.patches.accelerate.proofs.resume_order_ranks"
WRONG = ("map", "workers", "split batches", "iterable", "dispatched iterable")
#: By the case, in which of the four epochs it goes on as it should, with the patch and without.
RIGHT = {
    "dispatched": [True] * 4,
    "dispatched, split": [True] * 4,
    "in order": [True] * 4,
    "without a seed": [True, False, False, False],
}
ONE_RANK = ("map", "workers", "iterable", "dispatched iterable", *RIGHT)


def levels(release, *more):
    path = ":".join(str(folder(name)) for name in (f"accelerate-{release}", *more))
    return (*TORCH, Level("tests.harness.loading:accelerate", path))


@pytest.fixture
def resumed(run_ranks):
    """Each rank's report."""

    def run(*cases, release="1.13", more=(), ranks=1):
        reports = run_ranks(WORKER, *cases, levels=levels(release, *more), ranks=ranks)
        assert all((one["version"], one["status"]) == (f"{release}.0", "applied") for one in reports)
        return reports

    return run


def goes_on(found):
    return [one == other for one, other in zip(found["left"], found["resumed"], strict=True)]


def is_repaired(reports, cases):
    for report in reports:
        for case in cases:
            for state in ("before", "reverted"):
                assert goes_on(report[state][case]) == [True, False, False, False], (case, state)
                epoch = len(report[state][case]["resumed"][-1])  # of the last one, which ends there
                first, third = report[state][case]["left"][0], report[state][case]["resumed"][2]
                assert third[:epoch] == first[:epoch], "the first epoch's order"
            assert goes_on(report["after"][case]) == [True] * 4, case
            assert report["after"][case]["left"] == report["before"][case]["left"], "without a stop it is the same"


def test_a_loop_goes_on_in_the_epochs_own_order(resumed):
    is_repaired(resumed(*ONE_RANK), [case for case in ONE_RANK if case in WRONG])


def test_what_was_right_is_the_same(resumed):
    (report,) = resumed(*ONE_RANK)
    for case, right in RIGHT.items():
        assert goes_on(report["before"][case]) == right
        if case != "without a seed":
            assert report["after"][case] == report["before"][case]


def test_the_epochs_after_it_are_as_without_a_stop(resumed):
    (report,) = resumed(*ONE_RANK)
    for case in ONE_RANK:
        if case != "without a seed":
            for state in ("before", "after"):
                assert report[state][case]["next"][:3] == report[state][case]["left"][1:]


@pytest.mark.exhaustive
@pytest.mark.parametrize("release", ["1.13", "1.8"])
def test_on_two_ranks(resumed, release):
    reports = resumed(*WRONG, release=release, ranks=2)
    is_repaired(reports, WRONG)
    whole, other = (report["after"]["map"]["left"] for report in reports)
    assert whole != other, "each rank has its own part"


@pytest.mark.exhaustive
def test_transformers_4s_trainer(resumed):
    is_repaired(resumed("Trainer", more=("transformers-4.57",)), ["Trainer"])


@pytest.mark.exhaustive
def test_a_release_that_keeps_the_epoch_itself(run_ranks):
    """The environment's own, 1.15."""
    (report,) = run_ranks(
        WORKER, "map", "iterable", levels=(*TORCH, Level("tests.harness.loading:accelerate")), ranks=1
    )
    assert report["status"] == "unaffected"
    for case in ("map", "iterable"):
        assert goes_on(report["before"][case]) == [True] * 4
        assert report["before"][case] == report["after"][case]


def told(given, made):
    assert of_its_epoch(given, lambda *args, **kwargs: made)(2, skip_batches=1) is made
    return vars(made).copy()


def test_only_a_new_loader_of_a_later_epoch_is_told():
    made = SimpleNamespace(iteration=0)
    assert told(SimpleNamespace(iteration=3), made) == {"iteration": 3}
    assert told(SimpleNamespace(iteration=0), SimpleNamespace(iteration=0)) == {"iteration": 0}
    assert told(SimpleNamespace(), SimpleNamespace(iteration=0)) == {"iteration": 0}
    assert told(SimpleNamespace(iteration=3), SimpleNamespace()) == {}, "torch's own loader counts no epochs"
    assert told(SimpleNamespace(iteration=3), SimpleNamespace(iteration=2)) == {"iteration": 2}, "it was told already"


def test_the_loader_that_was_given_is_left_alone():
    given = SimpleNamespace(iteration=3)
    told(given, SimpleNamespace(iteration=0))
    assert vars(given) == {"iteration": 3}
    same = SimpleNamespace(iteration=3)
    assert told(same, same) == {"iteration": 3}
