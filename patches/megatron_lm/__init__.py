"""Patches of Megatron-LM's own training loop (``megatron.training``, in git only)."""
