"""Patches of SkyRL."""

NO_PROOF = "a proof needs Megatron on CUDA, Ray and vLLM, which the tests replace with fakes"
"""Why `rlhf-patches prove` cannot run the patches that have no proof."""
