"""Edits of a module's text, which keep its number of lines; and why there can be none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Unrecognised(Exception):
    """The code is not what the patch was written for; the message says what is missing."""


class Undefined(Exception):
    """The edited code would use a name that nothing defines, and raise NameError in the middle of training."""


class NoEffect(Exception):
    """Under ``python -O`` the code to be repaired (an assertion) is not compiled, so there is nothing to repair."""


class Edit(NamedTuple):
    """Characters ``start`` to ``end`` of a module's text become ``text``."""

    start: int
    end: int
    text: str

    def overlaps(self, other: Edit) -> bool:
        """Whether the two touch the same characters."""
        return self.start < other.end and other.start < self.end


def with_edits(text: str, edits: Iterable[Edit]) -> str:
    """``text`` with all edits made."""
    for edit in sorted(edits, reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text


def edited(text: str, edits: Sequence[Edit]) -> str:
    """``text`` with all edits made; the number of lines stays the same."""
    result = with_edits(text, edits)
    if result.count("\n") != text.count("\n"):  # not an assert: under -O it would be gone
        raise Unrecognised("the edits change the number of lines")
    return result
