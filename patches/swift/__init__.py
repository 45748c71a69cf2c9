"""Patches of ModelScope ms-swift."""

NO_PROOF = (
    "a proof needs Megatron on CUDA, or a trainer that needs several gigabytes; the tests replace them with fakes"
)
"""Why `rlhf-patches prove` cannot run the patches without a proof."""
