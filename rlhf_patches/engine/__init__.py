"""Applies patches to this process, all or nothing, and reverts them."""
