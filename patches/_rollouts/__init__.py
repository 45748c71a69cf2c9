"""Shared code of all frameworks' watches: the figures, their limits, and checks of samples."""
