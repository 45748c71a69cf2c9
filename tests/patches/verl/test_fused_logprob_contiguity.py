"""verl-fused-logprob-contiguity on verl's real function (fused_logprob_contiguity_ranks.py)."""

from __future__ import annotations

import pytest

from rlhf_patches.patches.verl.proofs import fused_logprob_contiguity_ranks as ranks

WORKER = ranks.__name__
RULE_COVERAGE = {
    "minimal scope": "test_what_is_contiguous_is_the_same_bit_for_bit",
    "no side effects": "test_what_is_not_contiguous_had_no_gradient_and_has_it",
    "backward compatible": "test_what_is_contiguous_is_the_same_bit_for_bit",
    "no new blocking": "because it is one flag of one process's tensor; no lock, no collective",
    "Results for contiguous hidden states": "test_what_is_contiguous_is_the_same_bit_for_bit",
}
# float32 against float64, sums of a hundred products; seen up to 2e-6.
TOLERANCE = 1e-5


@pytest.fixture(
    scope="module",
    params=["0.8", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("0.4", "0.6", "0.7"))],
)
def report(reported, request):
    return reported(WORKER, request.param)


@pytest.mark.parametrize("case", ranks.WRONG)
def test_what_is_not_contiguous_had_no_gradient_and_has_it(report, case):
    for trained, (model, _) in ranks.TRAINED.items():
        before, after = (report[state][f"{case}, {trained}"] for state in ("before", "after"))
        assert before["there"][0] is False
        assert before["expected"][0] is model
        assert after["there"] == after["expected"]
        assert max(after["errors"]) < TOLERANCE


def test_what_is_contiguous_is_the_same_bit_for_bit(report):
    for case in ranks.RIGHT:
        for trained in ranks.TRAINED:
            before, after = (report[state][f"{case}, {trained}"] for state in ("before", "after"))
            assert before["there"] == before["expected"]
            assert max(before["errors"]) < TOLERANCE
            assert after == before


def test_it_reports_the_hidden_states_that_lose_their_gradient(report):
    calls = len(ranks.TRAINED) * len({**ranks.WRONG, **ranks.RIGHT})
    models = sum(model for model, _ in ranks.TRAINED.values())
    assert report["reached"] == {"calls": calls, "asked": calls, "held": models * len(ranks.WRONG)}


def test_reverted_it_is_verls_again(report):
    assert report["reverted"] == report["before"]
