"""``swift-grpo-loss-scale``: a step of ms-swift's GRPO trainer against the published objectives in float64.

What is observed is in grpo_loss_scale_ranks.py: as released, patched and reverted, in one process on each rank.
"""

from __future__ import annotations

import pytest

from tests.harness.forkserver import swift

RULE_COVERAGE = {
    "minimal scope": "test_in_evaluation_nothing_divides_and_nothing_is_multiplied",
    "no side effects": "because it multiplies a loss, and reads four attributes of the trainer",
    "backward compatible": (
        "test_in_evaluation_nothing_divides_and_nothing_is_multiplied",
        "test_a_loss_that_is_a_mean_of_its_micro_batch_keeps_its_weight",
        "test_what_is_one_s_own_is_left_alone",
    ),
    "does not change a step with user code": "test_what_is_one_s_own_is_left_alone",
    "no new blocking": "because it is one product on this rank's loss; no lock, no collective",
    "Runs without accumulation are not affected": "test_a_step_is_the_mean_over_the_tokens_of_all_micro_batches",
    "In training, the patch multiplies": "test_in_evaluation_nothing_divides_and_nothing_is_multiplied",
}

WORKER = "rlhf_patches.patches.swift.proofs.grpo_loss_scale_ranks"
STEPS = 3
# float32 through two layers, against float64 from the same weights; seen: up to 1e-6.
ROUNDING = 1e-5
exhaustive = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def observe(run_ranks):
    def run(folder, ranks=1, *arguments):
        return run_ranks(WORKER, *arguments, levels=swift(folder, "swift_transformers"), ranks=ranks)

    return run


@pytest.mark.parametrize(
    ("folder", "ranks"),
    [
        ("swift-4.3", 1),
        *(pytest.param(*each, marks=exhaustive) for each in (("swift-4.3", 2), ("swift-4.5", 2), ("swift-3.12", 2))),
    ],
)
def test_a_step_is_the_mean_over_the_tokens_of_all_micro_batches(observe, folder, ranks):
    for report in observe(folder, ranks):
        assert report["status"] == "applied"
        assert report["reached"]["least"] == report["reached"]["most"] == 1 / STEPS
        for loss_type in ("dapo", "cispo"):
            for state in ("before", "reverted"):
                assert report[state][loss_type]["loss"] == pytest.approx(1 / STEPS, rel=ROUNDING)
                assert report[state][loss_type]["gradient"] == pytest.approx(1 / STEPS, rel=ROUNDING)
            after = report["after"][loss_type]
            assert after["loss"] == pytest.approx(1, rel=ROUNDING)
            assert after["off"] <= ROUNDING


def test_a_loss_that_is_a_mean_of_its_micro_batch_keeps_its_weight(observe):
    """CHORD's: the sum is right only if the other part alone is multiplied."""
    (report,) = observe("swift-4.3")
    assert report["before"]["with CHORD"]["off"] > 0.1
    assert report["after"]["with CHORD"]["off"] <= ROUNDING
    assert report["after"]["with CHORD"]["loss"] == pytest.approx(1, rel=ROUNDING)


def test_in_evaluation_nothing_divides_and_nothing_is_multiplied(observe):
    (report,) = observe("swift-4.3")
    for loss_type in ("dapo", "cispo"):
        for state in ("before", "after"):
            assert report[state][loss_type]["in evaluation"] == pytest.approx(1, rel=ROUNDING)


@pytest.mark.parametrize(
    "folder", ["swift-4.3", *(pytest.param(f"swift-{each}", marks=exhaustive) for each in ("4.5", "3.12"))]
)
def test_what_is_one_s_own_is_left_alone(observe, folder):
    """It has the size right as released: in a method of the loss, or in a step that divides nothing."""
    (report,) = observe(folder, 1, "--own")
    assert report["reached"]["held"] == 0
    for own in ("compute_loss", "_compute_loss_and_metrics", "training_step"):
        assert report["before"][own]["off"] <= ROUNDING
        assert report["after"][own] == report["before"][own]
        (line,) = (line for line in report["after"]["said"] if f" Own.{own} " in line)
        assert "is not the release's own: the gradient stays as released" in line
    assert not any("repaired" in line for line in report["after"]["said"])


@exhaustive
def test_the_release_that_has_the_repair_agrees_and_is_left_alone(observe):
    (report,) = observe(None)
    assert report["status"] == "unaffected"
    for name, before in report["before"].items():
        assert before["off"] <= ROUNDING, name
        assert report["after"][name] == before
