"""A function that carries patches, and the steps that change it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from ..guards.decision import Held
from ..guards.edits import Unrecognized
from ..guards.places import Place, Source
from ..guards.shapes import Recognized
from . import functions
from .reached import Entries, Probe


@dataclass(eq=False, kw_only=True)
class Patched(Held):
    """A function object that carries at least one patch, and the data to give it any set of patches."""

    function: FunctionType
    located: functions.Located
    target: str
    source: Source
    place: Place
    original: CodeType
    current: CodeType
    inner: CodeType
    """The code with the patches, without the watch that wraps them."""
    entries: Entries
    counted: dict[str, Probe | None] = field(default_factory=dict)
    """Its patches and observers, each with its condition; reports have the call counts."""
    watch: Callable[..., Any] | None = None
    given: list[tuple[CodeType, list[str]]] = field(default_factory=list)
    """Every code object that it was given, with its patches, for readers without the lock."""

    def counted_without(self, name: str) -> dict[str, Probe | None]:
        """Return `counted` without a patch."""
        return {other: probe for other, probe in self.counted.items() if other != name}

    @property
    def carried(self) -> list[str]:
        """The patches of this function, its watch, and its observers."""
        return list(dict.fromkeys((*self.holders, *self.counted)))

    def runs(self, name: str) -> bool:
        """Whether the function is still at its target, and its current code has a patch."""
        code = self.function.__code__  # read once: another thread may swap it
        if not any(code is given and name in holders for given, holders in list(self.given)):
            return False
        module_name, _, qualname = self.target.partition(":")
        module = sys.modules.get(module_name)
        try:
            return module is not None and functions.reaches(functions.attribute(module, qualname).raw, self.function)
        except Unrecognized:
            return False


class Swap(NamedTuple):
    """One step of applying a patch: a function gets the code ``new``, or ``inner`` wrapped by its watch."""

    patched: Patched
    inner: CodeType
    watch: Callable[..., Any] | None
    new: CodeType
    changes: list[Recognized]
    counted: dict[str, Probe | None]


class Plan(NamedTuple):
    """The steps to apply a patch; ``functions`` are all that carry it then, including those from before a reload."""

    name: str
    watches: bool
    observes: bool
    swaps: list[Swap]
    functions: list[Patched]
