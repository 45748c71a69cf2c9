"""Patches of NVIDIA Megatron-Bridge."""
