"""Figures of a run that a `Watch` records: the worst value of each, and one warning if it exceeds its limit.

A figure is a Python number that the framework has already computed: converting a GPU tensor would wait for the GPU, so
no implementation does it. Errors of a watch are logged at level debug.
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
"""The number of first values whose median is the usual value of this run."""


T = TypeVar("T")


class Runs(Generic[T]):
    """A value for each run of this process, as long as the run's object, such as its trainer, lives.

    Args:
        make: creates the value of a new run.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._known: dict[int, tuple[object, T]] = {}

    def of(self, run: object) -> T:
        """Return a run's value. All objects without weak references, such as None, share one."""
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
    """The gravest level so far: 1 unusual, 2 above the limit."""


@dataclass(frozen=True)
class Known:
    """A known harmless cause of larger values.

    Attributes:
        says: a sentence on the cause for the log.
        usual: whether it applies from the beginning, so that only values that are unusual in this run count; else only
            the limit counts.
    """

    says: str
    usual: bool = False


class Figure:
    """One figure of the rollouts, for each run of this process.

    Args:
        watch: the name of the `Watch`.
        what: the figure's name in `settings.FIGURES`, for ``RLHF_PATCHES_LIMITS``.
        says: the meaning of a value for the log; ``{}`` is replaced by the value.
        limit: values above it give a warning.
        times: values above this multiple of the usual value also give a warning; None: they do not.
        floor: the smallest value that ``times`` applies to.
        points_to: patches and advices for bugs that affect the figure.
        local: whether each rank has its own values; else only the logging rank warns.
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
        """Record a value of a run.

        Warn once if it exceeds the limit or is NaN; and once before that if it is unusual in this run.

        Args:
            at: the value's place, such as "step 3".
            run: the run's own object, such as its trainer; it is not kept alive. None: the process is one run.
            known: returns the current harmless cause of larger values; called if a value exceeds the limit.
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
        """Return the level of a value (0: no warning), the reason, and the sentence on a harmless cause."""
        own = settings.limit(self.what)
        limit = self.limit if own is None else own
        beyond = math.isnan(value) or value > limit
        usual = statistics.median(first) if self._times is not None and len(first) == _USUAL else math.inf
        unusual = limit != math.inf and value > max((self._times or 1) * usual, self._floor)
        if not beyond and not unusual:
            return 0, "", ""
        larger = None
        with looking(self.watch):  # an error of `known` does not suppress a warning
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
        known = f"Unrepaired known bugs with this sign: {', '.join(off)}; see" if off else "See"
        return f"{known} `rlhf-patches explain {self.watch}`"

    def observed(self) -> dict[str, Any]:
        """Return for a report ``worst``, its place ``at``, the number of ``values``, and the ``warning``, if any."""
        if not self._count:
            return {}
        values = {"worst": finite(self._worst), "at": self._at, "values": self._count}
        return {self.what: {**values, "warning": self._warning} if self._warning else values}


def observed(*figures: Figure) -> dict[str, Any]:
    """Return the observations of a `Watch` for reports."""
    return {what: values for figure in figures for what, values in figure.observed().items()}


@contextlib.contextmanager
def looking(watch: str) -> Iterator[None]:
    """A context for a watch's code: its errors do not affect the run."""
    try:
        yield
    except no_signal(Exception) as error:
        logger().debug("%s failed: %s: %s", watch, type(error).__name__, error)
