"""Definitions of patches, their sources, and the texts that report their status."""
