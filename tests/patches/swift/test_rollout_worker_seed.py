"""``swift-rollout-worker-seed``: how many different samples of a prompt the rollout server's workers return.

What is observed is in rollout_worker_seed_ranks.py: as released, patched and reverted, in one process. A sample is
eight of 32 tokens: two are the same by chance in one of a billion groups.
"""

from __future__ import annotations

import os

import pytest

from tests.harness import side_by_side, unpacked
from tests.harness.forkserver import PACKAGES, Level, swift

WORKER = "rlhf_patches.patches.swift.proofs.rollout_worker_seed_ranks"
RULE_COVERAGE = {
    "minimal scope": "test_with_one_worker_or_seeds_of_their_own_nothing_changes",
    "no side effects": (
        "because it reads the server's arguments, and gives a keyword to the engine that is made of them"
    ),
    "backward compatible": (
        "test_with_one_worker_or_seeds_of_their_own_nothing_changes",
        "test_what_else_stands_for_a_seed_is_none",
    ),
    "no new blocking": "because it is an addition, before the worker has begun",
    "nothing changes": "test_with_one_worker_or_seeds_of_their_own_nothing_changes",
    "The first worker's seed does not change": "test_the_samples_of_a_group_differ",
    "Rollouts are reproducible, as before": "test_the_samples_of_a_group_differ",
}

exhaustive = pytest.mark.exhaustive
RELEASES = ["swift-3.12", *(pytest.param(each, marks=exhaustive) for each in ("3.6.4", "3.8.3"))]


@pytest.fixture(scope="module", params=RELEASES)
def report(request, run_ranks):
    if request.param.startswith("swift-"):
        levels = swift(request.param, "swift_engine")
    else:
        needed = (str(side_by_side.folder(name)) for name in ("swift-3.12", "math-verify-0.7"))
        folders = os.pathsep.join((unpacked.folders(f"ms-swift=={request.param}"), *needed))
        levels = (*PACKAGES, Level("tests.harness.loading:swift_engine", folders))
    (found,) = run_ranks(WORKER, levels=levels, ranks=1)
    assert found["status"] == "applied"
    return found


def different(samples):
    return len({tuple(sample) for sample in samples})


@pytest.mark.parametrize(
    ("case", "released", "seeds"),
    [
        ("2 workers", 4, [None, 1]),
        ("a worker for each sample", 1, [None, *range(1, 8)]),
        ("a seed for the server", 4, [5, 6]),
    ],
)
def test_the_samples_of_a_group_differ(report, case, released, seeds):
    """Those of the first worker are what they were, in every run."""
    for state in ("before", "reverted"):
        assert [different(samples) for samples in report[state][case]["samples"]] == [released] * 2
    found = report["after"][case]
    assert found["seeds"] == seeds
    assert [different(samples) for samples in found["samples"]] == [8, 8]
    first = 8 // len(seeds)
    for was, now in zip(report["before"][case]["samples"], found["samples"], strict=True):
        assert now[:first] == was[:first]


def test_with_one_worker_or_seeds_of_their_own_nothing_changes(report):
    assert report["after"]["1 worker"] == report["before"]["1 worker"]
    name = "a seed for each request"
    assert report["after"][name]["samples"] == report["before"][name]["samples"]
    assert different(report["after"][name]["samples"][0]) == 8


def test_its_condition_holds_for_each_worker_but_the_first(report):
    """Of five servers, one of which has one worker."""
    reached = report["reached"]
    seeds = [found["seeds"] for found in report["after"].values()]
    assert reached["asked"] == reached["calls"] == sum(map(len, seeds))
    assert reached["held"] == sum(len(each) - 1 for each in seeds)


def test_what_the_condition_says():
    from rlhf_patches.patches.swift.rollout_worker_seed import has_the_first_ones_seed

    assert [has_the_first_ones_seed(rank) for rank in (0, 1, None)] == [False, True, None]


@pytest.mark.parametrize("given", [None, {}, '{"seed": 5}', {"seed": None}, {"seed": "5"}])
def test_what_else_stands_for_a_seed_is_none(given):
    from types import SimpleNamespace

    from rlhf_patches.patches.swift.rollout_worker_seed import seed_of

    for args in (SimpleNamespace(vllm_engine_kwargs=given), SimpleNamespace()):
        assert seed_of(args, 0) == {}
        assert seed_of(args, 2) == {"seed": 2}
