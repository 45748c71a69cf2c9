"""SkyRL's normalized advantages, through its own estimators and policy loss, against the formulas in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rlhf_patches.patches.skyrl._conditions import normalized_mean_with_padding
from rlhf_patches.patches.skyrl.proofs.advantage_padding import deviation, expected
from tests.harness.forkserver import skyrl_trainer

RULE_COVERAGE = {
    "minimal scope": "because the line is one that only advantage_batch_normalize reaches",
    "no side effects": "because it replaces a mean by another; what is assigned to the batch is what SkyRL assigns",
    "backward compatible": "test_the_length_of_the_padding_makes_no_difference",
    "no new blocking": "because it runs in the trainer's process; no lock, no collective",
    "are not affected": "because the line is one that only that setting reaches",
}

NAME = "skyrl-advantage-padding"
CASES = ["grpo, 9", "grpo, 30", "gae, 9", "gae, 30"]
# Sums of 21 float32 numbers of size 1 and less, divided by 21.
ROUNDING = 2e-7
RELEASES = ["0.1", "0.4", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("0.2", "0.3"))]


@pytest.fixture(scope="module", params=RELEASES)
def report(run_ranks, request):
    """The gradients as released, with the patch, and after a revert."""
    worker = "rlhf_patches.patches.skyrl.proofs.advantage_padding_ranks"
    (found,) = run_ranks(worker, levels=skyrl_trainer(request.param), ranks=1, TORCHDYNAMO_DISABLE="1")
    assert (found["version"], found["status"]) == (f"{request.param}.0", "applied")
    return found


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_that_of_the_formula(report, case):
    wanted = expected(report["after"]["given"], case, report["version"])
    assert deviation(report["after"][case], wanted) < ROUNDING
    assert deviation(report["before"][case], wanted) > 1e4 * ROUNDING
    assert report["reverted"][case] == report["before"][case]


def test_the_condition(report):
    """Each batch of this worker has padding."""
    reached = report["reached"]
    assert reached["held"] == reached["asked"] == reached["calls"] == len(CASES)


@pytest.mark.parametrize(
    ("advantages", "mask", "on", "expected"),
    [
        ([[1.0, -1.0], [2.0, 0.0]], [[1, 1], [1, 0]], True, True),
        ([[1.0, -1.0], [2.0, 0.0]], [[1, 1], [1, 0]], False, False),
        ([[1.0, -1.0], [2.0, 0.5]], [[1, 1], [1, 1]], True, False),
        ([[1.0, -1.0], [0.0, 0.0]], [[1, 1], [1, 0]], True, False),  # with a mean of 0 padding is harmless
    ],
)
def test_padding_that_changes_the_mean(advantages, mask, on, expected):
    trainer = SimpleNamespace(
        cfg=SimpleNamespace(trainer=SimpleNamespace(algorithm=SimpleNamespace(advantage_batch_normalize=on)))
    )
    data = {"advantages": torch.tensor(advantages), "response_mask": torch.tensor(mask)}
    assert normalized_mean_with_padding(trainer, data) is expected
    on_a_device = {name: one.to("meta") for name, one in data.items()}
    assert normalized_mean_with_padding(trainer, on_a_device) is (None if on else False)


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_the_length_of_the_padding_makes_no_difference(report, estimator):
    def tokens(state, length):
        return [value for row in report[state][f"{estimator}, {length}"] for value in row]

    bootstraps_from_it = estimator == "gae" and report["version"] == "0.1.0"
    assert (tokens("after", 30) == pytest.approx(tokens("after", 9), abs=ROUNDING)) != bootstraps_from_it
    assert tokens("before", 30) != pytest.approx(tokens("before", 9), abs=1e4 * ROUNDING)
