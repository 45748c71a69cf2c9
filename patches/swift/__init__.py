"""Patches of ModelScope ms-swift."""

NO_PROOF = "it takes Megatron on CUDA, or a trainer of several gigabytes, for which the tests have stand-ins"
"""Why `rlhf-patches prove` cannot try those of the patches that have no proof."""
