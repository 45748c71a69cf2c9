"""Figures of a run that a `Watch` notes: what each was at worst, and one line in the log where it is out of its limit.

A figure is what the framework has computed already, as a number of Python's: to make one of a tensor on a GPU is to
wait for that GPU, so no implementation does. Whatever goes wrong in looking goes to the log at level debug.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from . import settings
from .definitions.words import finite
from .engine.engine import engine
from .engine.log import logger, speaks
from .import_system import no_signal

_USUAL = 10
"""Of so many first values the median is what is usual in this run."""


T = TypeVar("T")


class Runs(Generic[T]):
    """Something for each run of this process, as long as an object of the run's own lives, its trainer say.

    Args:
        make: makes it, of a run that is new.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._known: dict[int, tuple[object, T]] = {}

    def of(self, run: object) -> T:
        """What a run has. All objects without weak references, None say, have one together."""
        known, key = self._known, id(run)
        if key in known:
            return known[key][1]
        try:
            reference = weakref.ref(run, lambda _: known.pop(key, None))
        except TypeError:
            reference, key = None, 0
        return known.setdefault(key, (reference, self._make()))[1]


@dataclass
class _Run:
    first: list[float] = field(default_factory=list)
    gravest: int = 0
    """The gravest that was: 1 what is unusual, 2 what is above the limit."""


@dataclass(frozen=True)
class Known:
    """What is known to make a figure larger in a run in which nothing is wrong.

    Attributes:
        says: what it is, a sentence for the line in the log.
        usual: whether it does so from the beginning, so that only what is unusual in this run means anything; else
            only the limit does.
    """

    says: str
    usual: bool = False


class Figure:
    """One figure of the rollouts, of each run of this process.

    Args:
        watch: the name of the `Watch`.
        what: of `settings.FIGURES`, by which ``RLHF_PATCHES_LIMITS`` sets its limit.
        says: what a value means, for the line in the log; ``{}`` stands for the value.
        limit: values above it give a warning.
        times: values above so many times what is usual in this run give one too; None: they do not.
        floor: but none below this.
        points_to: patches and advices for bugs that show in it.
        local: whether each rank has values of its own; else only the rank that logs says it.
    """

    def __init__(
        self,
        watch: str,
        what: str,
        says: str,
        limit: float,
        times: float | None = None,
        floor: float = 0.0,
        points_to: tuple[str, ...] = (),
        local: bool = False,
    ) -> None:
        self.watch, self.what, self.limit, self.points_to = watch, what, limit, points_to
        self._says, self._times, self._floor, self._local = says, times, floor, local
        self.start_anew()

    def start_anew(self) -> None:
        """Forget all runs."""
        self._runs = Runs(_Run)
        self._count, self._worst, self._at, self._warning = 0, -math.inf, "", ""

    def note(
        self, value: float, at: str = "", run: object = None, known: Callable[[], Known | None] | None = None
    ) -> None:
        """A value of a run.

        Says so once if it is out of the limit, as NaN is; once before that if it is unusual in this run.

        Args:
            at: where it was, "step 3" say.
            run: what the run has for itself, its trainer say; it is not kept alive. None: the process is one run.
            known: what makes values larger at this moment with nothing wrong; asked where a value is out of the limit.
        """
        self._count += 1
        if math.isnan(value) or value > self._worst:
            self._worst, self._at = value, at
        of = self._runs.of(run)
        grave, why, also = self._exceeds(value, of.first, known)
        if len(of.first) < _USUAL and math.isfinite(value):
            of.first.append(value)
        if grave > of.gravest:
            of.gravest = grave
            warning = f"{self._says.format(f'{value:.3g}')}{f' at {at}' if at else ''} ({why})"
            self._warning = self._warning or warning
            if self._local or speaks():
                logger().warning("%s: %s. %s%s", self.watch, warning, f"{also} " if also else "", self._next())
            engine.on_change()

    def _exceeds(
        self, value: float, first: list[float], known: Callable[[], Known | None] | None
    ) -> tuple[int, str, str]:
        """How grave a value is, 0 where it gives no warning; why; and what is to be said of the run first."""
        own = settings.limit(self.what)
        limit = self.limit if own is None else own
        beyond = math.isnan(value) or value > limit
        usual = statistics.median(first) if self._times is not None and len(first) == _USUAL else math.inf
        unusual = limit != math.inf and value > max((self._times or 1) * usual, self._floor)
        if not beyond and not unusual:
            return 0, "", ""
        larger = None
        with looking(self.watch):  # what goes wrong in asking makes no value pass
            larger = known() if known is not None else None
        if larger is not None and not math.isnan(value):
            beyond = beyond and (own is not None or unusual or not larger.usual)
            unusual = unusual and beyond
        also = larger.says if larger is not None else ""
        if beyond:
            return 2, f"limit {limit:g}", also
        return (1, f"{usual:.3g} is usual in this run", also) if unusual else (0, "", "")

    def _next(self) -> str:
        off = []
        for name in self.points_to:
            with contextlib.suppress(settings.SettingsError):
                off += [name] if engine.may_be_there(name) else []
        known = f"Known bugs with this sign that nothing repairs here: {', '.join(off)}; " if off else ""
        return f"{known}`rlhf-patches explain {self.watch}` says what it is a sign of"

    def observed(self) -> dict[str, Any]:
        """For a report: ``worst``, ``at`` where that was, of how many ``values``, and the ``warning``, if any."""
        if not self._count:
            return {}
        found = {"worst": finite(self._worst), "at": self._at, "values": self._count}
        return {self.what: {**found, "warning": self._warning} if self._warning else found}


def observed(*figures: Figure) -> dict[str, Any]:
    """What a `Watch` says in reports."""
    return {what: found for figure in figures for what, found in figure.observed().items()}


@contextlib.contextmanager
def looking(watch: str) -> Iterator[None]:
    """Around whatever a watch does: a run goes on as without it."""
    try:
        yield
    except no_signal(Exception) as error:
        logger().debug("%s could not look: %s: %s", watch, type(error).__name__, error)
