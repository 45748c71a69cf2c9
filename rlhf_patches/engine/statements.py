"""The program's import statements, as the stack shows them: nothing tells when one ends, or whether another follows."""

from __future__ import annotations

import sys
from collections.abc import Container
from types import FrameType

from ..guards.sources import namespace_of


def asked_by_a_function() -> bool:
    """Whether the innermost import on the stack was begun within a function."""
    return _asker(_importing(sys._getframe(1))) not in ("", "<module>")


def go_on(frameworks: Container[str]) -> bool:
    """Whether the innermost import on the stack is part of statements of which there may be more.

    That is so at the top level of a module, and within ``from FRAMEWORK import ...`` anywhere: a package may import a
    module for each of the names.

    Args:
        frameworks: top-level packages.
    """
    frame = _importing(sys._getframe(1))
    if _asker(frame) == "<module>":
        return True
    while frame is not None:
        if frame.f_code.co_name == "_handle_fromlist" and _is_importlib(frame):
            name = namespace_of(frame.f_locals.get("module")).get("__name__")
            if isinstance(name, str) and name.partition(".")[0] in frameworks:
                return True
        frame = frame.f_back
    return False


def _importing(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the import system; None where nothing is being imported."""
    while frame is not None and not _is_importlib(frame):
        frame = frame.f_back
    return frame


def _asker(frame: FrameType | None) -> str:
    """The name of the code that has asked for an import; empty where nothing is being imported, or C has asked."""
    while frame is not None and _is_importlib(frame):
        frame = frame.f_back
    return frame.f_code.co_name if frame is not None else ""


def _is_importlib(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith("<frozen importlib")
