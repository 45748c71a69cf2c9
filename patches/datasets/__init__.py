"""Patches of datasets."""
