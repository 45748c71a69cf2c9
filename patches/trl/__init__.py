"""Patches of Hugging Face TRL."""
