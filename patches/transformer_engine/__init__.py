"""Patches of TransformerEngine."""
