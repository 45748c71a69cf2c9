"""Patches applied to this process: when, all or nothing, and undone."""
