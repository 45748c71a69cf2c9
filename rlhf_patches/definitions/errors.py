"""What is raised where a patch is described wrongly."""

from __future__ import annotations


class DefinitionError(ValueError):
    """A patch is described wrongly; the message says which field, what was expected and what to write."""
