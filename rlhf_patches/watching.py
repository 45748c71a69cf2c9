"""Figures of a run that a `Watch` notes: what each was at worst, and one line in the log where it is out of its limit.

A figure is what the framework has computed already, as a number of Python's: to make one of a tensor on a GPU is to
wait for that GPU, so no implementation does. Whatever goes wrong in looking goes to the log at level debug.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterator
from typing import Any

from . import settings
from .definitions.status import finite
from .engine.engine import engine
from .engine.log import logger, speaks
from .import_system import no_signal

_USUAL = 10
"""Of so many first values the median is what is usual in this run."""


class Figure:
    """One figure of the rollouts, of this process, for as long as it runs.

    Args:
        watch: the name of the `Watch`.
        what: of `settings.FIGURES`, by which ``RLHF_PATCHES_LIMITS`` sets its limit.
        says: what a value means, for the line in the log; ``{}`` stands for the value.
        limit: values above it are told.
        times: values above so many times what is usual in this run are told, too; None: they are not.
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
        """Forget the run."""
        self._first: list[float] = []
        self._count, self._worst, self._at, self._told = 0, -math.inf, "", ""

    def note(self, value: float, at: str = "") -> None:
        """A value of this run; ``at`` says where it was, "step 3" say.

        Says so once, if it is out of the limit. NaN is.
        """
        self._count += 1
        if math.isnan(value) or value > self._worst:
            self._worst, self._at = value, at
        why = self._exceeds(value)
        if len(self._first) < _USUAL and math.isfinite(value):
            self._first.append(value)
        if why and not self._told:
            self._told = f"{self._says.format(f'{value:.3g}')}{f' at {at}' if at else ''} ({why})"
            if self._local or speaks():
                logger().warning("%s: %s. %s", self.watch, self._told, self._next())
            engine.on_change()

    def _exceeds(self, value: float) -> str:
        """Why a value is to be told, empty where it is not."""
        limit = settings.limit(self.what)
        limit = self.limit if limit is None else limit
        if math.isnan(value) or value > limit:
            return f"limit {limit:g}"
        if self._times is None or len(self._first) < _USUAL or limit == math.inf:
            return ""
        usual = statistics.median(self._first)
        return f"{usual:.3g} is usual in this run" if value > max(self._times * usual, self._floor) else ""

    def _next(self) -> str:
        off = []
        for name in self.points_to:
            with contextlib.suppress(settings.SettingsError):
                off += [name] if engine.may_be_there(name) else []
        known = f"Known bugs with this sign that nothing repairs here: {', '.join(off)}; " if off else ""
        return f"{known}`rlhf-patches explain {self.watch}` says what it is a sign of"

    def observed(self) -> dict[str, Any]:
        """For a report: ``worst``, ``at`` where that was, of how many ``values``, and what was ``told``, if it was."""
        if not self._count:
            return {}
        found = {"worst": finite(self._worst), "at": self._at, "values": self._count}
        return {self.what: {**found, "told": self._told} if self._told else found}


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
