"""Patches of torch."""
