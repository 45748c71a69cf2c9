"""A stand-in for slime, which is not on PyPI: written for these tests, nothing of slime is in it."""
