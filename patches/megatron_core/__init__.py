"""Patches of megatron-core, the library under every Megatron framework."""

NO_PROOF = "Megatron runs on CUDA only; the tests replace CUDA with a fake on two CPU ranks"
"""Why `rlhf-patches prove` cannot run the patches without a proof."""
