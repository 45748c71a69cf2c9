"""verl-rejected-in-group: verl's real rollout correction and estimators, against float64."""

from __future__ import annotations

import pytest

from rlhf_patches.patches.verl.proofs import rejected_in_group_ranks as proof
from rlhf_patches.patches.verl.rejected_in_group import PATCH

WORKER = "tests.patches.verl.rejected_in_group_own_ranks"
RULE_COVERAGE = {
    "minimal scope": "test_all_others_stay",
    "no side effects": "test_the_batch_keeps_its_names",
    "backward compatible": "test_all_others_stay",
    "known": "test_all_others_stay",
    "no new blocking": "because it reads a batch of the trainer's process; no lock, no collective",
    "bit for bit": ("test_all_others_stay", "test_groups_without_a_rejected_response_have_the_same_bits"),
    "count as before": "test_all_others_stay",
    "stay as released": "because these functions are not patched",
}
# float32 against float64, numbers up to 5.
TOLERANCE = 1e-5


@pytest.fixture(
    scope="module",
    params=["0.9", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("0.8", "0.7", "0.7.0"))],
)
def report(reported, request):
    return reported(WORKER, request.param)


@pytest.mark.parametrize("case", ["", ", alone"])
@pytest.mark.parametrize("estimator", proof.ESTIMATORS)
def test_the_advantages_are_those_of_the_responses_that_are_kept(report, estimator, case):
    masks = report["after"]["masks"]
    assert [row for row, tokens in enumerate(masks["rejected"]) if not tokens] == [*proof.REJECTED]
    assert [row for row, tokens in enumerate(masks["alone"]) if not tokens] == [1, 2, 3]
    assert report["before"][f"{estimator}{case}"]["error"] > 0.1
    assert report["after"][f"{estimator}{case}"]["error"] < TOLERANCE


@pytest.mark.parametrize("estimator", [name for name in proof.ESTIMATORS if "plus" not in name])
def test_groups_without_a_rejected_response_have_the_same_bits(report, estimator):
    """REINFORCE++ normalizes over the whole batch."""
    before, after = (report[state][f"{estimator}, alone"]["found"] for state in ("before", "after"))
    assert before[4:] == after[4:]


def test_all_others_stay(report):
    kinds = ("none rejected", "rejected in part", "whole groups", "numbers", "numbers as objects", "a tensor")
    names = [name for name in report["before"] if name.endswith(kinds)]
    assert len(names) == 5 * len(proof.ESTIMATORS) + 1
    for name in names:
        assert report["after"][name] == report["before"][name], name


def test_the_batch_keeps_its_names(report):
    assert report["after"]["names"] == list(proof.PROMPTS)


def test_the_condition_is_a_group_with_both(report):
    reached = report["reached"]
    assert reached["held"] == 2 * len(proof.ESTIMATORS) + 1
    assert reached["asked"] == reached["calls"]


def test_a_run_without_rollout_rs_is_not_excluded():
    """0.6.1 and 0.7.0 reject whole responses by rollout_token_veto_threshold, too."""
    assert not any("rollout_rs" in each for each in PATCH.excluded_by)


def test_an_estimator_that_has_the_bug_is_not_excluded():
    """GPG, too, takes the mean of all responses of a group; it stays as released."""
    (estimators,) = PATCH.excluded_by
    assert not {"gpg", "grpo_passk", "rloo_vectorized"} & set(estimators.partition("=")[2].split("|"))


def test_reverted_it_is_verls_again(report):
    assert report["reverted"] == report["before"]
