"""A function that carries patches, and the steps that are to change it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from ..guards.decision import Held
from ..guards.edits import Unrecognised
from ..guards.places import Place, Source
from ..guards.shapes import Recognised
from . import functions
from .reached import Entries, Probe


@dataclass(eq=False, kw_only=True)
class Patched(Held):
    """A function object that carries at least one patch, and what it takes to give it any set of them."""

    function: FunctionType
    located: functions.Located
    target: str
    source: Source
    place: Place
    original: CodeType
    current: CodeType
    inner: CodeType
    """With its patches, and without its watch, which goes around them whichever come and go."""
    entries: Entries
    counted: dict[str, Probe | None] = field(default_factory=dict)
    """Its patches, and those that only observe it, each with its condition: reports say how often it is entered."""
    watch: Callable[..., Any] | None = None
    given: list[tuple[CodeType, list[str]]] = field(default_factory=list)
    """Every code object that it was given, with the patches in that: what a reader without the lock can rely on."""

    def counted_without(self, name: str) -> dict[str, Probe | None]:
        """What is left of those without a patch."""
        return {other: probe for other, probe in self.counted.items() if other != name}

    @property
    def carried(self) -> list[str]:
        """The patches on this function, its watch, and what only observes it."""
        return list(dict.fromkeys((*self.holders, *self.counted)))

    def runs(self, name: str) -> bool:
        """Whether the function is still where the target says, and the code that it runs now has a patch in it."""
        code = self.function.__code__  # looked at once: another thread may swap it
        if not any(code is given and name in holders for given, holders in list(self.given)):
            return False
        module_name, _, qualname = self.target.partition(":")
        module = sys.modules.get(module_name)
        try:
            return module is not None and functions.reaches(functions.attribute(module, qualname).raw, self.function)
        except Unrecognised:
            return False


class Swap(NamedTuple):
    """One step of applying a patch: a function is to get ``new`` as its code, or ``inner`` and its watch around it."""

    patched: Patched
    inner: CodeType
    watch: Callable[..., Any] | None
    new: CodeType
    changes: list[Recognised]
    counted: dict[str, Probe | None]


class Plan(NamedTuple):
    """What applying a patch takes: ``functions`` are all that carry it then, those of before a reload included."""

    name: str
    watches: bool
    observes: bool
    swaps: list[Swap]
    functions: list[Patched]
