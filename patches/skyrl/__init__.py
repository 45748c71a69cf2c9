"""Patches of SkyRL."""
