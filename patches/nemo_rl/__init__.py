"""Patches of NVIDIA NeMo-RL."""
