"""``verl-rollout-seed`` on verl's real server, with an engine that draws as vLLM does (rollout_seed_ranks.py)."""

from __future__ import annotations

import pytest

from rlhf_patches.patches.verl.proofs import rollout_seed_ranks
from tests.harness import forkserver, unpacked

RULE_COVERAGE = {
    "minimal scope": "test_the_rest_is_as_released",
    "no side effects": "because it computes a number; what it is called with is read",
    "backward compatible": "test_the_rest_is_as_released",
    "no new blocking": "because it hashes a few characters; no lock, no collective",
    "as before": "test_another_run_draws_the_same",
    "nothing changes": "test_the_rest_is_as_released",
    "that a caller has set stays": "test_the_rest_is_as_released",
}
WORKER, GROUP = rollout_seed_ranks.__name__, rollout_seed_ranks.GROUP
STATES = ("before", "after", "reverted")


@pytest.fixture(scope="module", params=["0.9.1", pytest.param("0.9.0", marks=pytest.mark.exhaustive)])
def report(request, run_ranks):
    the_environments = request.param == "0.9.1"
    levels = forkserver.verl_engine(None if the_environments else unpacked.folders(f"verl=={request.param}"))
    (report,) = run_ranks(WORKER, levels=levels, ranks=1)
    assert (report["status"], report["version"]) == ("applied", request.param)
    return report


def different(found):
    return len({tuple(tokens) for tokens in found["tokens"]})


def test_samples_of_a_prompt_differ(report):
    for state in ("before", "reverted"):
        assert different(report[state]["a group"]) == 1, "without the patch: all the same"
    found = report["after"]["a group"]
    assert different(found) == len(GROUP)
    assert len(set(found["seeds"])) == len(GROUP)
    assert all(0 <= seed < 2**31 for seed in found["seeds"])


def test_samples_differ_where_verl_runs_by_default(report):
    """V1's trainer gives no sample a place: as released all have the id ``det-0``."""
    cases = ["V1"] + ["V1, with tools"] * (report["version"] != "0.9.0")
    for case in cases:
        for state in ("before", "reverted"):
            assert different(report[state][case]) == 1
        assert different(report["after"][case]) == len(report["after"][case]["tokens"]) == 8
    for other in ("V1, another row", "V1, another prompt"):
        assert not set(report["after"]["V1"]["seeds"]) & set(report["after"][other]["seeds"])


def test_it_reports_the_requests_with_the_seed_of_others(report):
    """Unknown for ids that are not verl's own."""
    found = report["after"]
    requests = {case: len(of_case["seeds"]) for case, of_case in found.items()}
    right = sum(requests[case] for case in ("a caller's seed", "not deterministic", "V1, not deterministic"))
    others = ["other ids"] + ["V1, with tools"] * (report["version"] == "0.9.0")
    known = sum(requests.values()) - sum(requests[case] for case in others)
    assert report["reached"] == {"calls": sum(requests.values()), "asked": known, "held": known - right}


def test_another_run_draws_the_same(report):
    for state in STATES:
        assert report[state]["a group"] == report[state]["again"]
        assert report[state]["V1"] == report[state]["V1 again"]


@pytest.mark.parametrize("other", ["another step", "another replica", "another turn", "before the first update"])
def test_no_two_requests_are_drawn_with_the_same_numbers(report, other):
    found = report["after"]
    assert different(found[other]) == len(GROUP)
    assert not set(found["a group"]["seeds"]) & set(found[other]["seeds"])


@pytest.mark.parametrize(
    ("case", "seeds"),
    [
        ("a caller's seed", {7}),
        ("other ids", {42}),
        ("not deterministic", {None}),
        ("V1, not deterministic", {None}),
    ],
)
def test_the_rest_is_as_released(report, case, seeds):
    assert report["before"][case] == report["after"][case] == report["reverted"][case]
    assert set(report["after"][case]["seeds"]) == seeds
