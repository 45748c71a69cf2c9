"""The patch on the framework itself: the contract of every patch, and what this one is for."""

from rlhf_patches_example import MASKED_MEAN
from toy_framework.losses import masked_mean

from rlhf_patches.testing import PatchContract

LOSSES, MASK = [1.0, 3.0, 0.0, 0.0], [1, 1, 0, 0]


class TestContract(PatchContract):
    patch = MASKED_MEAN


def test_padding_counts_without_the_patch_and_does_not_with_it(apply_patch):
    assert masked_mean(LOSSES, MASK) == 1.0
    apply_patch("toy-masked-mean")
    assert masked_mean(LOSSES, MASK) == 2.0
