"""The status of each patch as a table, a dictionary, JSON, or flat values for an experiment tracker."""

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
    """The status of a patch. Only APPLIED means that code was changed."""

    PENDING = "pending"
    """Not imported yet; it is applied on import if the guards match."""
    APPLIED = "applied"
    """The function runs with the patch."""
    INACTIVE = "inactive"
    """`apply` has not been called in this process."""
    DISABLED = "disabled"
    """Disabled by the user, or reverted."""
    ABSENT = "absent"
    """The framework, or the part of it that the patch targets, is not installed."""
    UNAFFECTED = "unaffected"
    """The version is outside the guard, or it is unknown and the code does not have the defect."""
    REFUSED = "refused"
    """The version is affected, but the code is not recognized or missing, or another patch has changed it."""
    FAILED = "failed"
    """An error of the patch or an exception, and nothing was changed; or other code has undone the patch."""
    OBSERVED = "observed"
    """Recognized and only counted, not changed (RLHF_PATCHES_OBSERVE)."""
    APPLIES = "applies"
    """Only from static inspection: the installed source is affected and recognized."""
    ADVICE = "advice"
    """For an advice, which applies nothing: the installed source is affected, and the report states what to do."""

    def __str__(self) -> str:
        return self.value

    @property
    def is_problem(self) -> bool:
        """Whether a user must look at it: the bug may be present, and it is not repaired."""
        return self in (Status.REFUSED, Status.FAILED)


_ACTING = (Status.APPLIED, Status.APPLIES)
_THERE = (Status.APPLIES, Status.ADVICE, Status.REFUSED, Status.FAILED)
"""The installed code has or may have the bug, and nothing in this process has repaired it."""


class PatchError(RuntimeError):
    """Strict mode: a patch was refused or failed. Not an ImportError, which frameworks often catch."""


@dataclass(frozen=True)
class PatchReport:
    """One patch's status. ``version`` is the installed distribution's, None if unknown."""

    name: str
    status: Status
    reason: str
    distribution: str
    version: str | None
    guard: str
    plugin: str
    unreviewed: bool = False
    """Unaffected by its version, but the code has the defect: a release newer than the patch; please report it."""
    observations: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """What the patch has done so far in this process: plain values by name."""
    reached: Reached | None = field(default=None, compare=False)
    """The call counts of the functions that it has changed or observes; None if they are not counted."""
    places: tuple[str, ...] = ()
    """``file:line`` of each function that runs with the patch, or would run with it."""
    changes_numbers: str | None = None
    """`Patch.changes_numbers` on one line, if the framework and the patch have been imported."""
    kind: str = PATCH
    """``patch``, ``advice`` or ``watch``."""
    what_to_do: str | None = None
    """`Advice.what_to_do` on one line, if the framework is installed."""
    harm: str = ""
    """`KnownBug.harm`, ``bug`` and ``when``, if the patch has been imported."""
    bug: str = ""
    when: str = ""

    @property
    def ran(self) -> bool:
        """Whether a function that it has changed or observes was called."""
        return self.reached is not None and self.reached.calls > 0

    @property
    def was_met(self) -> bool:
        """Whether its condition was true."""
        return self.reached is not None and self.reached.held > 0

    @property
    def needs_attention(self) -> bool:
        """Whether it is logged as a warning: the bug may be present, and it is not repaired."""
        return self.is_problem or self.unreviewed

    @property
    def is_problem(self) -> bool:
        """Whether a bug may be present and is not repaired; a watch that cannot run does not affect the run."""
        return self.status.is_problem and self.kind != WATCH

    @property
    def is_there(self) -> bool:
        """Whether the installed code has or may have the bug, and nothing in this process has repaired it."""
        return self.kind != WATCH and (self.status in _THERE or self.unreviewed)

    @property
    def why(self) -> str:
        """The reason, and the plugin of a patch that is not built-in, as one line."""
        reason = self.reason.replace(" is affected ", " is watched ", 1) if self.kind == WATCH else self.reason
        return printable(f"{' '.join(reason.split())}{credit(self.plugin)}".lstrip())

    @property
    def notice(self) -> str:
        """A second line for an applied patch that changes results, or for an advice for this release; else empty."""
        if self.what_to_do is not None and self.status is Status.ADVICE:
            return printable(f"what to do: {self.what_to_do}")
        if self.changes_numbers is None or self.status not in _ACTING:
            return ""
        return printable(f"repair changes results: {self.changes_numbers}")

    def below(self, places: bool = False, harm: bool = True) -> tuple[str, ...]:
        """Return the lines below the patch's row: the bug if present, the notice, the places.

        Args:
            places: whether to include the places.
            harm: whether to include the harm, which the row may already have.
        """
        bug = "" if self.status is Status.ADVICE else self.bug  # an advice's reason already has it
        what = ": ".join(filter(None, (self.harm if harm else "", bug)))
        wrong = ". ".join(filter(None, (what, self.when and f"When: {self.when}"))) if self.is_there else ""
        texts = (*filter(None, (printable(wrong), self.notice)),)
        reached = (printable(str(self.reached)),) if self.ran else ()
        return (*texts, *reached, *map(printable, self.places if places else ()))

    def to_dict(self) -> dict[str, Any]:
        """Return the stable JSON form: name, status, reason, distribution, version, guard, plugin.

        If present, also ``unreviewed``, ``observations``, ``reached``, ``changes_numbers``, ``places``, ``harm``,
        ``bug`` and ``when``; for an advice, ``kind`` and ``what_to_do``.
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
    """Return a patch's status together with the patch's own fields."""
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
    """The status of every registered patch, and the plugins that could not be loaded."""

    patches: tuple[PatchReport, ...]
    plugin_failures: tuple[PluginFailure, ...] = ()
    notes: tuple[str, ...] = ()
    """Further notes for the user that concern no single patch."""

    def __iter__(self) -> Iterator[PatchReport]:
        return iter(self.patches)

    def __getitem__(self, name: str) -> PatchReport:
        for patch in self.patches:
            if patch.name == name:
                return patch
        raise KeyError(f"unknown patch {name!r}; the patches are: {', '.join(p.name for p in self.patches)}")

    def with_status(self, *statuses: Status) -> tuple[PatchReport, ...]:
        """Return the patches with one of these statuses."""
        return tuple(patch for patch in self.patches if patch.status in statuses)

    @property
    def problems(self) -> tuple[PatchReport, ...]:
        """Refused and failed patches; not watches."""
        return tuple(patch for patch in self.patches if patch.is_problem)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as values that JSON can represent."""
        return {
            "patches": [patch.to_dict() for patch in self.patches],
            "plugin_failures": [{"plugin": f.plugin, "reason": f.reason} for f in self.plugin_failures],
            **({"notes": list(self.notes)} if self.notes else {}),
        }

    def to_json(self, **options: Any) -> str:
        """Return `to_dict` as JSON text; options are passed to `json.dumps`."""
        import json  # only on demand

        return json.dumps(self.to_dict(), **options)

    def to_flat_dict(self, prefix: str = "rlhf_patches/") -> dict[str, str]:
        """Return one short string per patch for experiment trackers: ``{"rlhf_patches/NAME": "applied"}``."""
        return {prefix + patch.name: patch.status.value for patch in self.patches}

    def to_brief(self, width: int | None = WIDTH) -> str:
        """Return the text of `str`: the bugs that occurred; problems and other active patches; counts of the rest."""
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
        lines += gone if len(gone) < 4 else [f"not installed: {len(absent)} for other packages"]
        return "\n".join([*lines, *self._end()])

    def to_text(self, width: int | None = WIDTH, everything: bool = False, places: bool = False) -> str:
        """Return a table of every patch.

        Args:
            width: the lines' width in characters; None: no line wraps.
            everything: one line for each patch of a framework that is not installed, instead of one per framework.
            places: show file and line of each function that runs with a patch, below it.
        """
        shown = [row for row in self.patches if everything or row.status is not Status.ABSENT]
        lines = _table(shown, width, [row.below(places) for row in shown]) if shown or not self.patches else []
        lines += folded(row for row in self.patches if row not in shown)
        return "\n".join([*lines, *self._end()])

    def _end(self) -> list[str]:
        """Return the lines that concern no patch: plugins that cannot be used, and notes."""
        return [*(printable(str(failure)) for failure in self.plugin_failures), *self.notes]

    def __str__(self) -> str:
        return self.to_brief()

    # An interpreter and a notebook show it for `apply()` in the last line.
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
    """Sort key: problems, bugs that occurred, patches that ran, the rest."""
    if row.needs_attention:
        return 0
    return 1 if row.was_met else 2 if row.ran else 3


def _matters(row: PatchReport) -> tuple[str, ...]:
    """Return the lines below a row; the notice on results is for runs in which the bug occurred."""
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
    """Return one line for each missing framework, with the number of its patches."""
    counts: dict[str, Counter[str]] = {}
    for row in absent:
        counts.setdefault(row.why, Counter())[row.kind] += 1
    return [f"{why}: {', '.join(itertools.starmap(_counted, kinds.items()))}" for why, kinds in counts.items()]


def _counted(kind: str, count: int) -> str:
    if kind == ADVICE:
        return f"{plural(count, 'piece')} of advice"
    return plural(count, kind, f"{kind}es")  # a patch, a watch
