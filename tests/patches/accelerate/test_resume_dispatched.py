"""``accelerate-resume-dispatched``: a loop with dispatch_batches on two ranks goes on with what is left of its epoch.

resume_order_ranks.py resumes loops of all kinds of loaders in each of four epochs, and holds them against whole ones.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlhf_patches.patches.accelerate.resume_dispatched import of_all_ranks
from tests.harness.forkserver import TORCH, Level
from tests.harness.side_by_side import folder

RULE_COVERAGE = {
    "minimal scope": "test_what_was_right_is_the_same",
    "no side effects": "because it reads three attributes of the loader and returns a number",
    "backward compatible": ("test_what_was_right_is_the_same", "test_how_many_batches_a_step_takes"),
    "no new blocking": "because it is a product of two numbers that every rank has; no lock, no collective",
    "a dispatcher without a batch raises": "test_where_nothing_would_be_left_it_is_as_released",
    "a resume at the end of an epoch can raise": "test_where_nothing_would_be_left_it_is_as_released",
    "is skipped as released": "test_where_nothing_would_be_left_it_is_as_released",
    "nothing changes": ("test_what_was_right_is_the_same", "test_how_many_batches_a_step_takes"),
}
WORKER = "rlhf_patches.patches.accelerate.proofs.resume_order_ranks"
NAME = "accelerate-resume-dispatched"
SPLIT = "dispatched, split"
OTHERS = ("map", SPLIT, "dispatched iterable", "iterable")


@pytest.fixture
def resumed(run_ranks):
    def run(release, ranks, others=OTHERS):
        path = str(folder(f"accelerate-{release}")) if release else None
        levels = (*TORCH, Level("tests.harness.loading:accelerate", path))
        reports = run_ranks(WORKER, "--patch", NAME, "dispatched", *others, levels=levels, ranks=ranks)
        assert {one["status"] for one in reports} == {"applied"}
        return reports

    return run


def is_repaired(reports):
    for report in reports:
        for state in ("before", "reverted"):
            found = report[state]["dispatched"]
            for left, rest in zip(found["left"], found["resumed"], strict=True):
                assert rest[1:] == left, "on two ranks it goes on after one step, not two"
        assert report["after"]["dispatched"]["resumed"] == report["after"]["dispatched"]["left"]


def is_the_same(reports, cases):
    for report in reports:
        for case in cases:
            assert report["after"][case] == report["before"][case], case


def test_the_rest_of_the_epoch_follows(resumed):
    reports = resumed(None, 2, [SPLIT])
    assert {report["version"] for report in reports} == {"1.15.0"}
    is_repaired(reports)
    is_the_same(reports, [SPLIT])
    whole, other = (report["after"]["dispatched"]["left"] for report in reports)
    assert whole != other, "each rank has its own part"


@pytest.mark.exhaustive
@pytest.mark.parametrize("release", [None, "1.13", "1.8"])
def test_every_kind_of_loader_in_this_release_and_older_ones(resumed, release):
    reports = resumed(release, 2)
    is_repaired(reports)
    is_the_same(reports, OTHERS)


def test_what_was_right_is_the_same(resumed):
    (report,) = resumed(None, 1)
    assert report["before"]["dispatched"]["resumed"] == report["before"]["dispatched"]["left"]
    is_the_same([report], ["dispatched", *OTHERS])


def test_how_many_batches_a_step_takes():
    state = SimpleNamespace(num_processes=3)
    assert of_all_ranks(SimpleNamespace(split_batches=False, state=state), range(9), 2) == 6
    assert of_all_ranks(SimpleNamespace(split_batches=True, state=state), range(9), 2) == 2
    assert of_all_ranks(SimpleNamespace(split_batches=False, state=state, submesh_tp=None), range(9), 2) == 6
    assert of_all_ranks(SimpleNamespace(split_batches=False, state=state, submesh_tp=object()), range(9), 2) == 2


def test_where_nothing_would_be_left_it_is_as_released():
    """An epoch that was whole: accelerate raises where it has nothing to dispatch."""
    loader = SimpleNamespace(split_batches=False, state=SimpleNamespace(num_processes=2))
    assert [of_all_ranks(loader, range(5), steps) for steps in (0, 1, 2, 3)] == [0, 2, 4, 3]
    assert of_all_ranks(loader, iter(range(5)), 1) == 1, "without a length"
    assert of_all_ranks(loader, range(12), 4) == 8, "a length that is only an upper bound is not seen through"
    loader._drop_last = True
    assert [of_all_ranks(loader, range(5), steps) for steps in (0, 1, 2)] == [0, 2, 2], "a remainder is not dispatched"
    assert [of_all_ranks(loader, range(6), steps) for steps in (1, 2, 3)] == [2, 4, 3]
