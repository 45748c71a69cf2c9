"""See `slime`."""
