"""Patches of Hugging Face accelerate."""
