"""Patches of THUDM slime."""
