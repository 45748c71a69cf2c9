"""Patches of SkyRL."""

NO_PROOF = "it takes Megatron on CUDA, Ray and vLLM, for which the tests have stand-ins"
"""Why `rlhf-patches prove` cannot try those of the patches that have no proof."""
