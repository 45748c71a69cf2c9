"""Patches of verl."""

NO_PROOF = "it takes Megatron on CUDA or verl's workers on GPUs, for which the tests have stand-ins"
"""Why `rlhf-patches prove` cannot try those of the patches that have no proof."""
