"""The version of this package, in a module of its own: what names it imports nothing else."""

__version__ = "0.1.0"
