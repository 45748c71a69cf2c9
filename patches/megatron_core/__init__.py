"""Patches of megatron-core, the library under every Megatron framework."""
