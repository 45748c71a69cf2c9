"""A make-believe framework."""
