"""The exception for an invalid definition."""

from __future__ import annotations


class DefinitionError(ValueError):
    """A definition is invalid; the message names the field and the expected value."""
