"""Consistency checks of a run's first gradient accumulation window."""
