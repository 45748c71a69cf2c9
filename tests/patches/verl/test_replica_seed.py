"""``verl-replica-seed`` on verl's real servers, with vLLM's generator (replica_seed_ranks.py)."""

from __future__ import annotations

import itertools

import pytest

from rlhf_patches.patches.verl.proofs import replica_seed_ranks
from tests.harness import forkserver, unpacked

RULE_COVERAGE = {
    "minimal scope": ("test_within_the_trainer_nothing_changes", "test_the_first_replica_keeps_its_seed"),
    "no side effects": "because it adds two numbers; what it is called with is read",
    "backward compatible": ("test_a_configuration_without_a_seed_starts", "test_a_seed_of_the_users_stays"),
    "no new blocking": "because it adds two numbers, both there before: no lock, no collective",
    "nothing changes": "test_within_the_trainer_nothing_changes",
    "as reproducible as before": "test_another_run_draws_the_same",
    "keep their numbers": "test_the_first_replica_keeps_its_seed",
    "is the user's for all replicas, and stays": "test_a_seed_of_the_users_stays",
    "The seed of the first replica does not change": "test_the_first_replica_keeps_its_seed",
}
WORKER, REPLICAS = replica_seed_ranks.__name__, replica_seed_ranks.REPLICAS
RANKS = list(range(REPLICAS))
STATES = ("before", "after", "reverted")
EVERY = replica_seed_ranks.ROWS * REPLICAS * (REPLICAS - 1) // 2
"""The rows of all pairs of replicas."""


def reported(run_ranks, release):
    beside = release if release == "0.7.0" else unpacked.folders(f"verl=={release}")
    (report,) = run_ranks(WORKER, levels=forkserver.verl_engine(beside), ranks=1)
    assert (report["status"], report["version"]) == ("applied", release)
    return report


@pytest.fixture(scope="module")
def report(run_ranks):
    return reported(run_ranks, "0.7.0")


def shared(replicas):
    """How many rows of batches are the same, token by token, in two replicas."""
    pairs = itertools.combinations(replicas, 2)
    return sum(ours == theirs for one, other in pairs for ours, theirs in zip(one, other, strict=True))


def draw_samples_of_their_own(report, case):
    for state in ("before", "reverted"):
        assert shared(report[state][case]) == EVERY, "without the patch: the same samples"
    assert shared(report["after"][case]) == 0


def begin_as_in_the_next_release(report):
    for state in ("before", "reverted"):
        assert report[state]["seeds"] == [0] * REPLICAS
        assert report[state]["a seed"] == [42] * REPLICAS
    assert report["after"]["seeds"] == report["after"]["colocated"] == RANKS
    assert report["after"]["a seed"] == [42 + rank for rank in RANKS]


def test_replicas_draw_samples_of_their_own(report):
    draw_samples_of_their_own(report, "alone")


def test_within_the_trainer_nothing_changes(report):
    for state in STATES:
        assert report[state]["hybrid"] == [42] * REPLICAS
        assert report[state]["within"] == report["before"]["within"]
    assert shared(report["before"]["within"]) == EVERY, "as the page says"


def test_the_seeds_are_those_of_the_release_that_repairs_it(report):
    begin_as_in_the_next_release(report)


@pytest.mark.exhaustive
@pytest.mark.parametrize("release", ["0.6.0", "0.6.1"])
def test_older_releases(run_ranks, release):
    found = reported(run_ranks, release)
    draw_samples_of_their_own(found, "alone")
    begin_as_in_the_next_release(found)


def test_where_the_trainers_generators_are_kept_they_differ(report):
    for state in STATES:
        assert shared(report[state]["awake"]) == 0
        assert report[state]["awake"] == report["before"]["awake"]


def test_the_nodes_of_a_replica_have_one_seed(report):
    assert report["after"]["nodes"] == [1, 1]


def test_the_first_replica_keeps_its_seed(report):
    for case in ("seeds", "a seed", "alone"):
        assert report["after"][case][0] == report["before"][case][0]


def test_it_reports_the_replicas_with_the_first_ones_seed(report):
    """Unknown within the trainer, and for a seed of the user's."""
    found = report["after"]
    known = [case for case in found if case not in ("hybrid", "the user's", "within", "awake")]
    first = len(known) - 1  # "nodes" are of another replica
    asked = sum(len(found[case]) for case in known)
    calls = sum(map(len, found.values()))
    assert report["reached"] == {"calls": calls, "asked": asked, "held": asked - first}


def test_another_run_draws_the_same(report):
    assert report["after"]["alone"] == report["after"]["again"]
    assert report["before"] == report["reverted"]


def test_a_seed_of_the_users_stays(report):
    for state in STATES:
        assert report[state]["the user's"] == [7] * REPLICAS


def test_a_configuration_without_a_seed_starts(report):
    assert report["before"]["no seed"] == [0] * REPLICAS
    assert report["after"]["no seed"] == RANKS
