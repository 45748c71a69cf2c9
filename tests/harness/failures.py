"""What a session of nox names of its failures again below the table that ends the command: CI keeps the end only."""

from __future__ import annotations

import os

FILE = "SESSION_FAILURES"
"""The variable that says where; tools/sessions.py sets it."""


def note(what: str) -> None:
    """A line of it, of what is given: up to 300 characters."""
    if (file := os.environ.get(FILE)) is not None:
        with open(file, "a") as lines:
            lines.write(" ".join(what.split())[:300] + "\n")
