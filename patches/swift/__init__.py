"""Patches of ModelScope ms-swift."""
