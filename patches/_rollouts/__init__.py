"""What the watches of all frameworks have in common: the figures, their limits, and samples by themselves."""
