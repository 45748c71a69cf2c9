"""Counts the calls of a patched function and how often the bug's condition was true.

The function's code has one more call as its first statement, to an object in the function's globals. The call takes no
lock and does not wait. For torch.compile it is a constant: no graph breaks, and compiled calls are not counted.
A function that is pickled by value (cloudpickle: Ray's actors) is pickled with a call that counts nothing.
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
    """The check of each call: a patch's condition, its predicate, and the predicate's arguments."""

    patch: str
    predicate: Callable[..., Any] | None
    """None: it has no condition, and the first call of the function is reported."""
    arguments: tuple[str, ...]
    measure: str


class Entries:
    """The calls of one function object.

    Args:
        function: the function; its globals get the counter.
        qualname: its qualified name in its module.
        on_first: called when a condition is true for the first time; must not raise.
        on_entry: called when a condition is evaluated for the first time.
    """

    def __init__(
        self,
        function: FunctionType,
        qualname: str,
        on_first: Callable[[str], None],
        on_entry: Callable[[], None] = lambda: None,
    ) -> None:
        # The same in each process, and not a private name of a class.
        self._name = f"_rlhf_patches_entered_{qualname.replace('.', '_')}"
        self._globals = function.__globals__
        self._on_first, self._on_entry = on_first, on_entry
        self._calls = _Count(1)
        self._before = _value(self._calls)
        self._asked: dict[str, _Asked] = {}

    def statement(self, probes: Iterable[Probe]) -> str:
        """Return the function's first statement, and prepare its globals; equal for equal conditions."""
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
        """Return the counts so far in this process."""
        asked = self._asked.get(patch)
        calls = _value(self._calls) - self._before
        return asked.seen(calls) if asked is not None else Reached(calls)

    def start_anew(self) -> None:
        """Reset the counts in a forked child."""
        self._before = _value(self._calls)
        for asked in self._asked.values():
            asked.start_anew()


class _Count(itertools.count):  # type: ignore[type-arg]
    """Pickled as an iterator of zeros: its numbers belong to this process, and Python 3.14 cannot pickle a count."""

    def __reduce__(self) -> tuple[Any, ...]:
        return iter, (int, 1)


def _counting(count: Callable[[], int], asks: bool) -> Callable[[], int]:
    """Return a function that counts a call and returns whether to evaluate conditions. It uses no module global."""
    if asks:

        def entered() -> int:
            guards = sys.modules.get("torch._guards")
            if guards is not None and guards.TracingContext.try_get() is not None:
                return False  # torch.compile calls constant functions while it traces
            return count()
    else:

        def entered() -> int:
            count()
            return False

    # The attribute that `torch.compiler.assume_constant_result` sets, without importing torch.
    entered._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return entered


def _is_traced() -> bool:
    """Whether torch.compile traces here. `_counting` repeats this: it is pickled by value, without this module."""
    guards = sys.modules.get("torch._guards")
    return guards is not None and guards.TracingContext.try_get() is not None


def _value(count: Any) -> int:
    """Return a count's value, which only its repr shows."""
    return int(repr(count).partition("(")[2][:-1])


class _Asked:
    """A condition and its results in all calls."""

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
        return bool, ()  # never called: the unpickled function counts nothing

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
            result = self._probe.predicate(*arguments)
            if result is not None:
                self.note(result)
        except no_signal(Exception) as error:
            logger().debug("the condition of %s failed: %s", self._probe.patch, error)

    def note(self, result: bool | float) -> None:
        next(self._answers)
        if result is False:
            return
        next(self._held)
        if result is not True:
            self._least, self._most = min(self._least, result), max(self._most, result)
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
"""The latest condition of each patch."""


def decided(patch: str, result: bool | float) -> None:
    """Record a repair's decision in a call whose condition returned None: whether the bug occurred, or by how much.

    Call it at most once in a call of the condition's target, and only if the condition returned None there. In code
    that torch.compile compiles it does nothing.
    """
    asked = _asked_of.get(patch) if not _is_traced() else None
    try:
        if asked is not None:
            asked.note(result)
    except no_signal(Exception) as error:  # the user's logging handler may raise
        logger().debug("the decision of %s could not be recorded: %s", patch, error)


decided._dynamo_marked_constant = True  # type: ignore[attr-defined]  # for torch.compile, as above


def together(by_target: Mapping[str, Sequence[Reached]]) -> Reached | None:
    """Combine the counts of all targets of a patch; a target has one for each function object (a reload adds one).

    The result covers the targets with a condition if there are any; else the target with the most calls.
    """
    targets = [in_all(each) for each in by_target.values()]
    conditioned = [one for one in targets if one.has_condition]
    return in_all(conditioned) if conditioned else max(targets, default=None, key=lambda one: one.calls)
