"""Patches of NVIDIA Megatron-Bridge."""

NO_PROOF = "Megatron runs on CUDA only; the tests replace CUDA with a fake on two CPU ranks"
"""Why `rlhf-patches prove` cannot run the patches without a proof."""
