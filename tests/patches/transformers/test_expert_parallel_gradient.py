"""transformers-expert-parallel-gradient on real releases, two ranks, against float64 in one process."""

from __future__ import annotations

import pytest
import torch

from rlhf_patches.patches.transformers import _expert_weights
from tests.harness import unpacked
from tests.harness.forkserver import TORCH, Level, beside

RULE_COVERAGE = {
    "minimal scope": "test_all_others_stay",
    "no side effects": "test_nothing_is_kept_alive",
    "backward compatible": ("test_all_others_stay", "test_weights_that_a_block_converts_are_left_as_released"),
    "no new blocking": "because the release's own sum takes another tensor; no collective is added",
    "bit for bit": "test_all_others_stay",
    "The patch adds no collective": "test_one_sum_in_place_of_one",
}
WORKER = "rlhf_patches.patches.transformers.proofs.expert_parallel_gradient_ranks"
LEVELS = (*TORCH, Level("tests.harness.loading:packages_below_transformers"))
WRONG = ("Qwen3-MoE", "batched_mm", "gpt-oss")
LEFT = ("no gradient", "tensor parallelism")
#: float32 against float64; seen are 2e-6.
TOLERANCE = 1e-5


def reports_of(run_ranks, release, *cases):
    tokenizers = ["tokenizers==0.22.2"] if release != "5.16.1" else []
    path = unpacked.folders(f"transformers=={release}", *tokenizers, "huggingface-hub==1.33.0")
    found = run_ranks(WORKER, "--first", path, *cases, levels=LEVELS, ranks=2)
    assert [report["version"] for report in found] == [release] * 2
    assert [report["status"] for report in found] == ["applied"] * 2
    return found


@pytest.fixture(
    scope="module",
    params=["5.12.1", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("5.7.0", "5.15.1", "5.16.1"))],
)
def found(request, run_ranks):
    return reports_of(run_ranks, request.param, *WRONG, *LEFT)


@pytest.mark.parametrize("case", WRONG)
def test_without_it_gradients_are_wrong_on_each_rank(found, case):
    """Or not a number: what `grouped_mm` leaves of masked weights is whatever the memory had."""
    for report in found:
        for state in ("before", "reverted"):
            assert report[state][case]["router"] > 0.3
            assert report[state][case]["rest"] > 0.01


@pytest.mark.parametrize("case", WRONG)
def test_with_it_they_are_those_of_one_process(found, case):
    for report in found:
        assert report["after"][case]["of"] > 20
        assert max(report["after"][case][kind] for kind in ("router", "rest")) < TOLERANCE


@pytest.mark.parametrize("case", [*WRONG, *LEFT])
def test_all_others_stay(found, case):
    """Outputs always; gradients where the experts are not divided among the ranks."""
    for report in found:
        assert report["after"][case]["logits"] == report["before"][case]["logits"]
        if case in LEFT:
            assert report["after"][case] == report["before"][case] == report["reverted"][case]
            assert report["after"][case]["router"] < TOLERANCE


def test_a_run_is_told(found):
    """Once for each layer of each case that it repairs."""
    for report in found:
        assert report["reached"]["held"] == report["reached"]["asked"] == 2 * len(WRONG)


def test_weights_that_a_block_converts_are_left_as_released(run_ranks):
    for report in reports_of(run_ranks, "5.12.1", "converted"):
        assert report["reached"]["asked"] == 0
        assert report["after"]["converted"]["logits"] == report["before"]["converted"]["logits"]
        assert report["after"]["converted"]["router"] > 0.3


def test_newer_releases_are_right_and_left_alone(run_ranks):
    for report in run_ranks(WORKER, levels=beside(None, "trainer"), ranks=2):
        assert report["status"] == "unaffected"
        assert report["after"]["Qwen3-MoE"]["router"] < TOLERANCE


def weights():
    made = torch.tensor([[0.75, 0.25], [0.5, 0.5]], requires_grad=True)
    return made, torch.tensor([[True, False], [False, True]])


def test_one_sum_in_place_of_one():
    """Of the weights before the mask, whose gradient is masked first, NaN or not."""
    made, elsewhere = weights()
    asked = []

    def doubled(tensor, mesh):
        asked.append((tensor, mesh))
        return tensor * 1.0

    found = _expert_weights.summed(doubled, _expert_weights.masked(made, elsewhere), "mesh")
    assert len(asked) == 1
    assert asked[0][0] is made
    assert torch.equal(found, made.detach().masked_fill(elsewhere, 0.0))
    found.backward(torch.tensor([[float("nan"), 2.0], [3.0, float("nan")]]))
    assert made.grad.tolist() == [[0.0, 2.0], [3.0, 0.0]]


def test_others_weights_are_the_releases_own():
    made, elsewhere = weights()
    masked = _expert_weights.masked(made, elsewhere)
    other = masked * 1.0
    assert _expert_weights.summed(lambda tensor, mesh: tensor, other, None) is other
    with torch.no_grad():
        masked = _expert_weights.masked(made, elsewhere)
    assert _expert_weights.summed(lambda tensor, mesh: tensor, masked, None) is masked


def test_nothing_is_kept_alive():
    made, elsewhere = weights()
    before = len(_expert_weights._before)
    masked = _expert_weights.masked(made, elsewhere)
    assert len(_expert_weights._before) == before + 1
    del masked
    assert len(_expert_weights._before) == before
