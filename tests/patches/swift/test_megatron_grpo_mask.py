"""``swift-megatron-grpo-mask``: a step of ms-swift's Megatron GRPO, against the completions' tokens in float64.

What is observed is in megatron_grpo_mask_ranks.py: as released, patched and reverted, in one process.
"""

from __future__ import annotations

import os

import pytest

from tests.harness import side_by_side, unpacked
from tests.harness.forkserver import PACKAGES, Level, swift

RULE_COVERAGE = {
    "minimal scope": "test_a_repair_of_ones_own_is_not_shifted_again",
    "no side effects": "test_the_batch_is_what_it_was_but_for_the_mask",
    "backward compatible": "test_the_batch_is_what_it_was_but_for_the_mask",
    "no new blocking": "because it is arithmetic on one rank: no lock, no collective",
    "it may have the repair": "test_a_repair_of_ones_own_is_not_shifted_again",
    "as many tokens as before": "test_the_batch_is_what_it_was_but_for_the_mask",
}

# float32 through a layer and its backward pass against float64. Seen: up to 3e-7.
ROUNDING = 1e-5
exhaustive = pytest.mark.exhaustive
RELEASES = ["swift-3.12", *(pytest.param(each, marks=exhaustive) for each in ("swift-3.12.0", "3.11.3", "4.0.2"))]


def levels(release):
    if release[0].isdigit():
        # With what 3.12 asks for, megatron-core 0.15 and TRL 0.24, as these do.
        folders = unpacked.folders(f"ms-swift=={release}"), str(side_by_side.folder("swift-3.12"))
        return (*PACKAGES, Level("tests.harness.loading:swift_megatron_rollouts", os.pathsep.join(folders)))
    return swift(release, "swift_megatron_rollouts")


@pytest.fixture(scope="module")
def observe(run_ranks):
    def run(release):
        (report,) = run_ranks("tests.patches.swift.megatron_grpo_mask_ranks", levels=levels(release), ranks=1)
        assert report["status"] == "applied"
        return report

    return run


def of_the_release(found):
    return {case: each for case, each in found.items() if not case.startswith("own ")}


@pytest.mark.parametrize("release", RELEASES)
def test_the_gradient_is_that_of_the_completions_tokens(observe, release):
    report = observe(release)
    assert set(report["before"]) == set(report["after"])
    for state in ("before", "reverted"):
        for case, found in of_the_release(report[state]).items():
            assert found["gradient"] > 0.1, case
            # On the policy each token of GRPO's loss is minus its advantage, whichever tokens are counted.
            assert (found["loss"] <= ROUNDING) == case.endswith(" grpo"), case
    for case, found in report["after"].items():
        assert found["loss"] <= ROUNDING, case
        assert found["gradient"] <= ROUNDING, case


@pytest.mark.parametrize("release", RELEASES)
def test_a_repair_of_ones_own_is_not_shifted_again(observe, release):
    report = observe(release)
    for case, found in report["after"].items():
        if case.startswith("own "):
            assert found["gradient"] <= ROUNDING, case
            assert found == report["before"][case]


@pytest.mark.parametrize("release", RELEASES)
def test_its_condition_holds_for_the_releases_own_trainer(observe, release):
    """Nothing is said of a user's own methods."""
    report = observe(release)
    own = len(report["after"]) - len(of_the_release(report["after"]))
    reached = report["reached"]
    assert (reached["held"], reached["asked"]) == (reached["calls"] - own, reached["calls"] - own)
    assert reached["held"] == len(of_the_release(report["after"]))


def test_what_the_condition_says():
    from types import FunctionType
    from types import SimpleNamespace as Has

    from rlhf_patches.patches.swift.megatron_grpo_mask import misplaced

    def users(*_):
        pass

    released = FunctionType(users.__code__, {"__name__": "swift.megatron.trainers.grpo_trainer"})
    assert misplaced(Has(loss_func=released, forward_step=released)) is True
    for trainer in (Has(), None, Has(loss_func=released), Has(loss_func=users, forward_step=released)):
        assert misplaced(trainer) is None


@pytest.mark.parametrize("release", RELEASES)
def test_the_batch_is_what_it_was_but_for_the_mask(observe, release):
    """As many tokens in each row, in a tensor of the same kind, and the labels unshifted: the trainer shifts them."""
    report = observe(release)
    for state in ("before", "after", "reverted"):
        for found in report[state].values():
            assert found["tokens"] == [4, 4]
            assert found["labels"]
    for case, found in report["after"].items():
        assert found["kind"] == report["before"][case]["kind"]
