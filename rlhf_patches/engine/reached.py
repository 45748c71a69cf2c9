"""How often a patched function is entered, and how often a bug's condition held there: what a report says mattered.

The function's code has one call more, put first; what it calls is in the function's globals. It takes no lock and
waits for nothing, and to torch.compile it is a constant: no graph breaks, and what runs compiled is not counted.
A function that is pickled by value (cloudpickle: Ray's actors) takes it along as what counts nothing.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

from ..definitions.reached import Reached, in_all
from ..import_system import no_signal
from .log import logger


class Probe(NamedTuple):
    """What is asked in each call: a patch's condition, the function that tells, and which arguments it takes."""

    patch: str
    predicate: Callable[..., Any] | None
    """None: it has no condition, and is told of once, when the function is entered for the first time."""
    arguments: tuple[str, ...]
    measure: str


class Entries:
    """The calls of one function object.

    Args:
        function: whose globals get what counts.
        qualname: in its module.
        on_first: called when a condition has held for the first time; must not raise.
        on_entry: called when a condition is asked for the first time.
    """

    def __init__(
        self,
        function: FunctionType,
        qualname: str,
        on_first: Callable[[str], None],
        on_entry: Callable[[], None] = lambda: None,
    ) -> None:
        # The same in each process, and not private to a class.
        self._name = f"_rlhf_patches_entered_{qualname.replace('.', '_')}"
        self._globals = function.__globals__
        self._on_first, self._on_entry = on_first, on_entry
        self._calls = _Count(1)
        self._before = _value(self._calls)
        self._asked: dict[str, _Asked] = {}

    def statement(self, probes: Iterable[Probe]) -> str:
        """What is put first into the function, which it makes ready; the same again for the same conditions."""
        probes = [*probes]
        self._globals[self._name] = _counting(self._calls.__next__, asks=bool(probes))
        calls = []
        for each in probes:
            name = f"{self._name}_{each.patch.replace('-', '_')}"
            asked = self._asked.setdefault(each.patch, _Asked(each, self._on_first, self._on_entry))
            self._globals[name] = asked
            calls.append(f"{name}({', '.join(each.arguments)})")
        return f"{self._name}()" + (f" and ({', '.join(calls)},)" if calls else "")

    def seen(self, patch: str) -> Reached:
        """So far, in this process."""
        asked = self._asked.get(patch)
        calls = _value(self._calls) - self._before
        return asked.seen(calls) if asked is not None else Reached(calls)

    def start_anew(self) -> None:
        """In a forked child, whose calls are its own."""
        self._before = _value(self._calls)
        for asked in self._asked.values():
            asked.start_anew()


class _Count(itertools.count):  # type: ignore[type-arg]
    """Pickled as an iterator of zeros: its numbers are of this process, and from 3.14 on no count can be pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return iter, (int, 1)


def _counting(count: Callable[[], int], asks: bool) -> Callable[[], int]:
    """What counts a call, and says whether conditions are to be asked. It names nothing of this module: see above."""
    if asks:

        def entered() -> int:
            guards = sys.modules.get("torch._guards")
            if guards is not None and guards.TracingContext.try_get() is not None:
                return False  # torch.compile calls what is constant while it traces
            return count()
    else:

        def entered() -> int:
            count()
            return False

    # What `torch.compiler.assume_constant_result` sets, without importing torch.
    entered._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return entered


def _value(count: Any) -> int:
    """How often a count was asked for its next number: it says so to nobody, but in its text."""
    return int(repr(count).partition("(")[2][:-1])


class _Asked:
    """A condition, in all calls."""

    def __init__(self, probe: Probe, on_first: Callable[[str], None], on_entry: Callable[[], None]) -> None:
        self._probe, self._on_first, self._on_entry = probe, on_first, on_entry
        self._is_entered = False
        self.start_anew()
        _asked_of[probe.patch] = self

    def start_anew(self) -> None:
        self._answers, self._held = itertools.count(), itertools.count()
        self._least, self._most = math.inf, -math.inf
        self._is_first = True

    def __reduce__(self) -> tuple[Any, ...]:
        return bool, ()  # never called: nothing is counted there

    def __call__(self, *arguments: Any) -> None:
        try:
            if not self._is_entered:
                self._is_entered = True
                self._on_entry()
            if self._probe.predicate is None:
                if self._is_first:
                    self._is_first = False
                    self._on_first(self._probe.patch)
                return
            found = self._probe.predicate(*arguments)
            if found is not None:
                self.note(found)
        except no_signal(Exception) as error:
            logger().debug("the condition of %s could not be told: %s", self._probe.patch, error)

    def note(self, found: bool | float) -> None:
        next(self._answers)
        if found is False:
            return
        next(self._held)
        if found is not True:
            self._least, self._most = min(self._least, found), max(self._most, found)
        if self._is_first:
            self._is_first = False
            self._on_first(self._probe.patch)

    def seen(self, calls: int) -> Reached:
        held = self._least <= self._most
        return Reached(
            calls,
            asked=_value(self._answers),
            held=_value(self._held),
            least=float(self._least) if held else None,
            most=float(self._most) if held else None,
            measure=self._probe.measure,
            has_condition=self._probe.predicate is not None,
        )


_asked_of: dict[str, _Asked] = {}
"""The latest of each patch."""


def decided(patch: str, found: bool | float) -> None:
    """Note what a repair has found in a call whose arguments could not tell: whether the bug bit there, or by how much.

    To be called at most once in a call of the condition's target, and only where the condition returned None there.
    """
    asked = _asked_of.get(patch)
    try:
        if asked is not None:
            asked.note(found)
    except no_signal(Exception) as error:  # of a handler of the user's logging
        logger().debug("what %s has decided could not be noted: %s", patch, error)


def together(found: Mapping[str, Sequence[Reached]]) -> Reached | None:
    """Of all targets of a patch, by target one for each of its function objects (a reload makes another).

    Those with a condition if there are any; else the target that was most often entered.
    """
    targets = [in_all(each) for each in found.values()]
    conditioned = [one for one in targets if one.has_condition]
    return in_all(conditioned) if conditioned else max(targets, default=None, key=lambda one: one.calls)
