"""The patch on the framework itself: the contract of every patch, and what this one is for."""

from rlhf_patches_example import MASKED_MEAN
from toy_framework.losses import masked_mean

from rlhf_patches.testing import PatchContract, untouched

LOSSES, MASK = [1.0, 3.0, 0.0, 0.0], [1, 1, 0, 0]
# What holds the patch to each rule of docs/writing-a-patch.md, and to what its texts say stays as it is.
RULE_COVERAGE = {
    "minimal scope": "because it is one operand of an expression, and runs nothing of its own",
    "no side effects": "test_lists_and_masks_stay_as_they_are",
    "backward compatible": "test_what_the_release_takes_it_still_takes",
    "no new blocking": "because it is arithmetic: no lock, no collective",
    "nothing changes": "test_without_padding_the_mean_is_that_of_the_release",
}


class TestContract(PatchContract):
    patch = MASKED_MEAN
    held = RULE_COVERAGE


def test_padding_counts_without_the_patch_and_does_not_with_it(apply_patch):
    assert masked_mean(LOSSES, MASK) == 1.0
    apply_patch("toy-masked-mean")
    assert masked_mean(LOSSES, MASK) == 2.0


def test_without_padding_the_mean_is_that_of_the_release(apply_patch):
    before = masked_mean(LOSSES, [1, 1, 1, 1])
    apply_patch("toy-masked-mean")
    assert masked_mean(LOSSES, [1, 1, 1, 1]) == before


def test_what_the_release_takes_it_still_takes(apply_patch):
    apply_patch("toy-masked-mean")
    assert masked_mean((1, 3), (True, True)) == 2.0
    assert masked_mean([1.0, 3.0], [0.5, 0.5]) == 2.0
    assert masked_mean(LOSSES, [0, 0, 0, 0]) == 0.0  # to divide by the sum alone would raise


def test_lists_and_masks_stay_as_they_are(apply_patch):
    losses, mask = list(LOSSES), list(MASK)
    apply_patch("toy-masked-mean")
    with untouched(losses, mask):
        masked_mean(losses, mask)
