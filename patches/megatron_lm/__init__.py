"""Patches of Megatron-LM's own training loop (``megatron.training``, in git only)."""

NO_PROOF = "Megatron runs on CUDA alone, for which the tests have a stand-in on two CPU ranks"
"""Why `rlhf-patches prove` cannot try those of the patches that have no proof."""
