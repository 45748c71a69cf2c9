"""Edits of a module's text, which keep its number of lines; and the exceptions if there are none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Unrecognized(Exception):
    """The patch was not written for this code; the message states what is missing."""


class Undefined(Exception):
    """The edited code uses an undefined name, and would raise NameError during training."""


class NoEffect(Exception):
    """Under ``python -O`` the code to repair (an assertion) is not compiled, so there is nothing to repair."""


class Edit(NamedTuple):
    """Replaces the characters ``start`` to ``end`` of a module's text by ``text``."""

    start: int
    end: int
    text: str

    def overlaps(self, other: Edit) -> bool:
        """Whether two edits touch the same characters."""
        return self.start < other.end and other.start < self.end


def with_edits(text: str, edits: Iterable[Edit]) -> str:
    """Return ``text`` with all edits."""
    for edit in sorted(edits, reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text


def edited(text: str, edits: Sequence[Edit]) -> str:
    """Return ``text`` with all edits; the number of lines must not change."""
    result = with_edits(text, edits)
    if result.count("\n") != text.count("\n"):  # not an assert, which -O removes
        raise Unrecognized("the edits change the number of lines")
    return result
