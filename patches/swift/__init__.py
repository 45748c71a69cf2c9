"""Patches of ModelScope ms-swift."""

NO_PROOF = "a proof needs Megatron on CUDA, or a trainer of several gigabytes; the tests replace them by stand-ins"
"""Why `rlhf-patches prove` cannot run the patches without a proof."""
