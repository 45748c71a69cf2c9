"""The fixtures of a make-believe framework."""

from tests.harness.make_believe import engine, framework, nothing_said_yet

__all__ = ["engine", "framework", "nothing_said_yet"]
