"""Patches of DeepSpeed."""
