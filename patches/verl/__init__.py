"""Patches of verl."""

NO_PROOF = "a proof needs Megatron on CUDA or verl's workers on GPUs, which the tests replace with fakes"
"""Why `rlhf-patches prove` cannot run the patches that have no proof."""
