"""verl-rejected-loss-mask: verl's trainer and its engine for FSDP, against float64 (rejected_loss_mask_ranks.py)."""

from __future__ import annotations

import pytest

from tests.harness.forkserver import verl_workers
from tests.patches.verl import rejected_loss_mask_ranks as worker

RULE_COVERAGE = {
    "minimal scope": "test_all_others_stay",
    "no side effects": "test_all_others_stay",
    "backward compatible": "test_all_others_stay",
    "known": ("test_all_others_stay", "test_the_log_says_what_stays"),
    "no new blocking": "because it reads a field from the storage as the same method reads the others; no lock",
    "acts only where": "test_all_others_stay",
    "of your own": "test_all_others_stay",
    "all stays as released": "test_all_others_stay",
    "so they stay as well": "test_all_others_stay",
    "are padding or rejected": "test_all_others_stay",
    "as released its gradient is 0": "test_a_mini_batch_without_a_token_has_the_gradient_that_it_had",
    "then left as released": "test_a_mini_batch_without_a_token_has_the_gradient_that_it_had",
    "does not change it": "test_all_others_stay",
}
# float32 against float64.
TOLERANCE = 1e-5
WRITTEN = ("tokens", "responses", "the critic alone", "empty ones are fewer", "geo_mean, entropy")


@pytest.fixture(scope="module", params=["0.9", pytest.param("0.8", marks=pytest.mark.exhaustive)])
def report(run_ranks, request):
    levels = verl_workers(None if request.param == "0.9" else request.param)
    (found,) = run_ranks(worker.__name__, levels=levels, ranks=1, TORCHDYNAMO_DISABLE="1")
    assert found["status"] == "applied"
    assert found["version"].startswith(request.param)
    return found


@pytest.fixture(scope="module")
def kept(report):
    """The share of tokens that are kept, by case; the mask that was read is that of the case without rejection."""
    total = sum(map(sum, report["before"]["none rejected"]["written"]["response_mask"]))
    return {name: sum(map(sum, report["before"][name]["written"]["response_mask"])) / total for name in worker.TRAINED}


@pytest.mark.parametrize("case", ["tokens", "responses"])
def test_the_gradient_is_that_of_the_tokens_that_are_kept(report, kept, case):
    assert kept[case] < 0.97
    assert report["before"][case]["gradient"]["norm"] == pytest.approx(kept[case], rel=TOLERANCE)
    assert report["after"][case]["gradient"]["distance"] < TOLERANCE
    factor = report["before"][case]["gradient"]["loss"] / report["after"][case]["gradient"]["loss"]
    assert factor == pytest.approx(kept[case], rel=1e-3)


@pytest.mark.parametrize("case", WRITTEN)
def test_both_masks_are_written(report, case):
    before, after = (report[state][case]["written"] for state in ("before", "after"))
    assert "loss_mask" not in before
    assert after == {**before, "loss_mask": before["response_mask"]}


def test_all_others_stay(report):
    names = [name for name in report["before"] if name not in WRITTEN]
    assert len(names) == 23
    for name in names:
        assert report["after"][name] == report["before"][name], name
        assert "loss_mask" not in report["after"][name]["written"], name
    for name in ("without a token mean", "none rejected"):
        assert report["after"][name]["gradient"]["distance"] < TOLERANCE


def test_a_mini_batch_without_a_token_has_the_gradient_that_it_had(report):
    """Two of the responses are rejected, and a mini-batch has two."""
    before, after = (report[state]["a mini-batch may be empty"] for state in ("before", "after"))
    assert before["gradient"]["bits"] == after["gradient"]["bits"]
    assert [sum(row) for row in after["written"]["response_mask"]].count(0) == len(worker.REJECTED)


def test_the_log_says_what_stays(report):
    for why in (
        "the trainer",
        "a function of",
        "the agent loop manager",
        "the policy loss",
        "another one than",
        "a mini-batch may be rejected",
    ):
        assert len([each for each in report["messages"] if why in each]) == 1, why


def test_the_condition_is_the_share_that_is_kept(report, kept):
    reached = report["reached"]
    unknown = 15
    assert reached["calls"] == len(report["before"])
    assert reached["asked"] == reached["calls"] - unknown
    assert reached["held"] == len(WRITTEN)
    assert reached["least"] == pytest.approx(kept["responses"])
    assert reached["most"] == pytest.approx(kept["tokens"])


def test_with_the_patch_of_the_group_it_is_right_too(report):
    both = report["both"]
    assert both["statuses"] == ["applied", "applied"]
    assert both["written"]["loss_mask"] == both["written"]["response_mask"]
    assert both["written"]["advantages"] != report["after"]["responses"]["written"]["advantages"]
    assert both["gradient"]["distance"] < TOLERANCE


def test_reverted_it_is_verls_again(report):
    assert report["reverted"] == report["before"]
