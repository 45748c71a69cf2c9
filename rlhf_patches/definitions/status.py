"""What was done, patch by patch: as a table, a dictionary, JSON, or flat values for an experiment tracker."""

from __future__ import annotations

import enum
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .listed import ADVICE, PATCH, WATCH, Listed
from .reached import Reached
from .registry import PluginFailure, credit
from .verdict import verdict
from .words import WIDTH, layout, plural, printable

if TYPE_CHECKING:
    from .bug import KnownBug


class Status(str, enum.Enum):
    """What became of a patch. Only APPLIED means that code was changed."""

    PENDING = "pending"
    """Not imported yet; it will be applied on import if the guards hold then."""
    APPLIED = "applied"
    """The function runs with the patch."""
    INACTIVE = "inactive"
    """`apply` has not been called in this process."""
    DISABLED = "disabled"
    """Switched off by the user, or reverted."""
    ABSENT = "absent"
    """The framework, or the part of it that the patch is for, is not installed."""
    UNAFFECTED = "unaffected"
    """The version is outside the guard, or it is unknown and the defect is not in the code."""
    REFUSED = "refused"
    """The version is affected, but the code is not recognised or not there, or another patch holds it."""
    FAILED = "failed"
    """A fault of the patch or an exception, and nothing was changed; or other code has undone the patch since."""
    OBSERVED = "observed"
    """Recognised, and left as released: RLHF_PATCHES_OBSERVE asks for counting alone."""
    APPLIES = "applies"
    """Only from static inspection: the installed source is affected and recognised."""
    ADVICE = "advice"
    """Of an advice, of which nothing is ever applied: the installed source is affected, and what to do is said."""

    def __str__(self) -> str:
        return self.value

    @property
    def is_problem(self) -> bool:
        """Whether a user has to look at it: the bug may be there, and it is not repaired."""
        return self in (Status.REFUSED, Status.FAILED)


_ACTING = (Status.APPLIED, Status.APPLIES)
_THERE = (Status.APPLIES, Status.ADVICE, Status.REFUSED, Status.FAILED)
"""The bug is, or may be, in what is installed, and nothing in this process has repaired it."""


class PatchError(RuntimeError):
    """Strict mode: a patch was refused or failed. Not an ImportError, which frameworks like to swallow."""


@dataclass(frozen=True)
class PatchReport:
    """One patch's state. ``version`` is that of the installed distribution, None when unknown."""

    name: str
    status: Status
    reason: str
    distribution: str
    version: str | None
    guard: str
    plugin: str
    unreviewed: bool = False
    """Unaffected by its version, but the code has the defect: a release newer than the patch, to be reported."""
    observations: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """What the patch says it has done so far in this process: plain values, by what they are."""
    reached: Reached | None = field(default=None, compare=False)
    """How often the functions were entered that it has changed, or is observing; None of those that are not counted."""
    places: tuple[str, ...] = ()
    """``file:line`` of each function that runs with the patch, or would."""
    changes_numbers: str | None = None
    """What `Patch.changes_numbers` says, on one line, where the framework and the patch have been imported."""
    kind: str = PATCH
    """Or ``advice``, or ``watch``."""
    what_to_do: str | None = None
    """What `Advice.what_to_do` says, on one line, where the framework is there."""
    harm: str = ""
    """What `KnownBug.harm`, ``bug`` and ``when`` say, where the patch has been imported."""
    bug: str = ""
    when: str = ""

    @property
    def ran(self) -> bool:
        """Whether a function was entered that it has changed, or is observing."""
        return self.reached is not None and self.reached.calls > 0

    @property
    def was_met(self) -> bool:
        """Whether its condition has held."""
        return self.reached is not None and self.reached.held > 0

    @property
    def needs_attention(self) -> bool:
        """Whether the log says it as a warning: the bug may be there, and it is not repaired."""
        return self.is_problem or self.unreviewed

    @property
    def is_problem(self) -> bool:
        """Whether a bug may be there and is not repaired; a watch that cannot look leaves the run as it is."""
        return self.status.is_problem and self.kind != WATCH

    @property
    def is_there(self) -> bool:
        """Whether the bug is, or may be, in what is installed, and nothing in this process has repaired it."""
        return self.kind != WATCH and (self.status in _THERE or self.unreviewed)

    @property
    def why(self) -> str:
        """The reason, and the plugin that brings the patch where it is not built-in: a line for people."""
        return printable(f"{' '.join(self.reason.split())}{credit(self.plugin)}".lstrip())

    @property
    def notice(self) -> str:
        """A line for people beside `why`; else empty.

        Where a patch changes numbers and is applied or would be, and where an advice is for this release.
        """
        if self.what_to_do is not None and self.status is Status.ADVICE:
            return printable(f"what to do: {self.what_to_do}")
        if self.changes_numbers is None or self.status not in _ACTING:
            return ""
        return printable(f"repair changes results: {self.changes_numbers}")

    def below(self, places: bool = False, harm: bool = True) -> tuple[str, ...]:
        """What a table has below the patch's row: the bug if it is there, the notice, the places.

        Args:
            places: whether these are asked for.
            harm: whether to say how bad the bug is, which the row may have said.
        """
        bug = "" if self.status is Status.ADVICE else self.bug  # an advice's reason has said it
        what = ": ".join(filter(None, (self.harm if harm else "", bug)))
        wrong = ". ".join(filter(None, (what, self.when and f"When: {self.when}"))) if self.is_there else ""
        said = (*filter(None, (printable(wrong), self.notice)),)
        reached = (printable(str(self.reached)),) if self.ran else ()
        return (*said, *reached, *map(printable, self.places if places else ()))

    def to_dict(self) -> dict[str, Any]:
        """The stable JSON form: name, status, reason, distribution, version, guard, plugin.

        And, where there is any, ``unreviewed``, ``observations``, ``reached``, ``changes_numbers``, ``places``,
        ``harm``, ``bug`` and ``when``; of an advice ``kind`` and ``what_to_do``.
        """
        wrong = {key: value for key in ("harm", "bug", "when") if (value := getattr(self, key))}
        advice = {"kind": self.kind} if self.kind != PATCH else {}
        advice |= {"what_to_do": self.what_to_do} if self.what_to_do else {}
        unreviewed = {"unreviewed": True} if self.unreviewed else {}
        observations = {"observations": dict(self.observations)} if self.observations else {}
        reached = {"reached": self.reached.to_dict()} if self.reached is not None else {}
        changes_numbers = {"changes_numbers": self.changes_numbers} if self.changes_numbers else {}
        places = {"places": list(self.places)} if self.places else {}
        return {
            "name": self.name,
            "status": self.status.value,
            "reason": self.reason,
            "distribution": self.distribution,
            "version": self.version,
            "guard": self.guard,
            "plugin": self.plugin,
            **unreviewed,
            **observations,
            **reached,
            **places,
            **changes_numbers,
            **advice,
            **wrong,
        }


def patch_report(
    patch: KnownBug | Listed,
    plugin: str,
    status: Status,
    reason: str,
    version: str | None,
    unreviewed: bool = False,
    places: tuple[str, ...] = (),
    reached: Reached | None = None,
) -> PatchReport:
    """A patch's state together with what the patch says about itself."""
    there = status is not Status.ABSENT
    changes_numbers: str | None = getattr(patch, "changes_numbers", None) if there else None
    what_to_do: str | None = getattr(patch, "what_to_do", None) if there else None
    harm, bug, when = ("", "", "") if isinstance(patch, Listed) else (patch.harm, patch.bug, patch.when)
    if status is Status.ADVICE and not isinstance(patch, Listed):
        reason = f"{reason}: {patch.summary}"
    return PatchReport(
        name=patch.name,
        status=status,
        reason=reason,
        distribution=patch.distribution,
        version=version,
        guard=patch.versions,
        plugin=plugin,
        unreviewed=unreviewed,
        places=places,
        reached=reached,
        changes_numbers=changes_numbers and " ".join(changes_numbers.split()),
        kind=patch.kind,
        what_to_do=what_to_do and " ".join(what_to_do.split()),
        harm=harm,
        bug=bug,
        when=when,
    )


@dataclass(frozen=True, repr=False)
class Report:
    """The state of every registered patch, and the plugins that could not be loaded."""

    patches: tuple[PatchReport, ...]
    plugin_failures: tuple[PluginFailure, ...] = ()
    notes: tuple[str, ...] = ()
    """What else a user should know, of no patch in particular."""

    def __iter__(self) -> Iterator[PatchReport]:
        return iter(self.patches)

    def __getitem__(self, name: str) -> PatchReport:
        for patch in self.patches:
            if patch.name == name:
                return patch
        raise KeyError(f"no patch is called {name!r}; there are: {', '.join(p.name for p in self.patches)}")

    def with_status(self, *statuses: Status) -> tuple[PatchReport, ...]:
        """The patches in one of these states."""
        return tuple(patch for patch in self.patches if patch.status in statuses)

    @property
    def problems(self) -> tuple[PatchReport, ...]:
        """Refused and failed patches; not watches."""
        return tuple(patch for patch in self.patches if patch.is_problem)

    def to_dict(self) -> dict[str, Any]:
        """Everything, in values that JSON has."""
        return {
            "patches": [patch.to_dict() for patch in self.patches],
            "plugin_failures": [{"plugin": f.plugin, "reason": f.reason} for f in self.plugin_failures],
            **({"notes": list(self.notes)} if self.notes else {}),
        }

    def to_json(self, **options: Any) -> str:
        """`to_dict` as JSON text; options go to `json.dumps`."""
        import json  # only where it is asked for

        return json.dumps(self.to_dict(), **options)

    def to_flat_dict(self, prefix: str = "rlhf_patches/") -> dict[str, str]:
        """One short string per patch, as experiment trackers like it: ``{"rlhf_patches/NAME": "applied"}``."""
        return {prefix + patch.name: patch.status.value for patch in self.patches}

    def to_brief(self, width: int | None = WIDTH) -> str:
        """What `str` gives: which bugs were met; problems, and what else is on; the rest in counts."""
        shown = sorted((row for row in self.patches if row.status not in _FOLDED), key=_by_weight)
        below = [_matters(row) for row in shown]
        lines = [each for each in [verdict(self.patches)] if each]
        lines += _table(shown, width, below) if shown or not self.patches else []
        for status, what in ((Status.PENDING, "waiting for an import"), (Status.UNAFFECTED, "not affected")):
            names = Counter(map(_framework, self.with_status(status)))
            if names:
                lines.append(f"{what}: {', '.join(f'{name} ({count})' for name, count in names.items())}")
        absent = self.with_status(Status.ABSENT)
        gone = folded(absent)
        lines += gone if len(gone) < 4 else [f"not there: {len(absent)} for other packages"]
        return "\n".join([*lines, *self._end()])

    def to_text(self, width: int | None = WIDTH, everything: bool = False, places: bool = False) -> str:
        """A table of every patch, for people.

        Args:
            width: of its lines, in characters; None: no line is wrapped.
            everything: a line for each patch of what is not installed, too, instead of one for all of a framework.
            places: file and line of each function that runs with a patch, below it.
        """
        shown = [row for row in self.patches if everything or row.status is not Status.ABSENT]
        lines = _table(shown, width, [row.below(places) for row in shown]) if shown or not self.patches else []
        lines += folded(row for row in self.patches if row not in shown)
        return "\n".join([*lines, *self._end()])

    def _end(self) -> list[str]:
        """What is of no patch: plugins that cannot be used, and notes."""
        return [*(printable(str(failure)) for failure in self.plugin_failures), *self.notes]

    def __str__(self) -> str:
        return self.to_brief()

    # What an interpreter and a notebook show of `apply()` in their last line.
    __repr__ = __str__

    def _repr_html_(self) -> str:
        import html  # only in a notebook

        heads = ("patch", "status", "framework", "reason")
        rows = [_cells(row) for row in self.patches if row.status is not Status.ABSENT]
        marked = [("th", heads)] * bool(rows) + [("td", row) for row in rows]
        table = "".join(
            f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>" for tag, cells in marked
        )
        more = [*folded(self.with_status(Status.ABSENT)), *self._end()]
        return f"<table>{table}</table>" + "".join(f"<div>{html.escape(line)}</div>" for line in more)


_FOLDED = (Status.UNAFFECTED, Status.PENDING, Status.ABSENT)


def _by_weight(row: PatchReport) -> int:
    """What to read first: problems, bugs that were met, what ran, the rest."""
    if row.needs_attention:
        return 0
    return 1 if row.was_met else 2 if row.ran else 3


def _matters(row: PatchReport) -> tuple[str, ...]:
    """What stands below a row: advice on results is for runs that have met the bug."""
    if _by_weight(row) < 2 or row.status is Status.ADVICE:
        return row.below()
    return (printable(str(row.reached)),) if row.ran else ()


def _table(rows: Sequence[PatchReport], width: int | None, below: Sequence[Sequence[str]]) -> list[str]:
    return layout(("PATCH", "STATUS", "FRAMEWORK", "REASON"), [_cells(row) for row in rows], width, below)


def _cells(row: PatchReport) -> tuple[str, ...]:
    return row.name, row.status.value, _framework(row), row.why


def _framework(row: PatchReport) -> str:
    return printable(f"{row.distribution} {row.version or '-'}")


def folded(absent: Iterable[PatchReport]) -> list[str]:
    """A line for each thing that is not there: what, and how many patches are for it."""
    counts: dict[str, Counter[str]] = {}
    for row in absent:
        counts.setdefault(row.why, Counter())[row.kind] += 1
    return [f"{why}: {', '.join(itertools.starmap(_counted, kinds.items()))}" for why, kinds in counts.items()]


def _counted(kind: str, count: int) -> str:
    if kind == ADVICE:
        return f"{plural(count, 'piece')} of advice"
    return plural(count, kind, f"{kind}es")  # a patch, a watch
