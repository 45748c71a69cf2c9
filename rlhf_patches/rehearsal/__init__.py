"""A run's own first window of gradient accumulation, held against itself."""
