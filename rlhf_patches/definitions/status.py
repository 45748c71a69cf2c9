"""What was done, patch by patch: as a table, a dictionary, JSON, or flat values for an experiment tracker."""

from __future__ import annotations

import enum
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from .listed import ADVICE, PATCH, WATCH, Listed
from .registry import PluginFailure, credit

if TYPE_CHECKING:
    from .bug import KnownBug

WIDTH = 130
"""Characters of a line, where no terminal says otherwise: logs."""
_LEAST = 36  # characters for the last column
_MOST = 44  # for another one in a pipe: beside one long cell the others would be blanks
_INDENT = 4


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


def finite(value: float) -> float | str:
    """A number as JSON has it, which knows no NaN and nothing infinite: those as text."""
    return value if math.isfinite(value) else str(value)


def observed_text(value: object) -> str:
    """What a patch, or a figure of a watch, has seen: "0.31 at worst, at step 3, of 40"."""
    if not isinstance(value, Mapping):
        return str(value)
    worst, at, told = value.get("worst"), value.get("at"), value.get("told")
    said = f"{worst:.3g}" if isinstance(worst, (int, float)) else str(worst)
    said += f" at worst{f', at {at}' if at else ''}, of {value.get('values')}"
    return f"{said}; told: {told}" if told else said


def printable(text: str) -> str:
    """Text from outside as one line: it must not move the cursor, nor be what no terminal can encode."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class Reached(NamedTuple):
    """How often a repaired place was reached in this process, and whether the bug bit there.

    Attributes:
        calls: of the function, compiled ones not counted.
        asked: in how many of them the bug's condition could be told.
        held: in how many of these it held.
        least, most: by how much, as ``measure`` says it; None where it is no number.
        measure: what the number is, ``divisor x``.
        has_condition: whether the patch tells a condition at all.
    """

    calls: int
    asked: int = 0
    held: int = 0
    least: float | None = None
    most: float | None = None
    measure: str = ""
    has_condition: bool = False

    def __str__(self) -> str:
        return self.said()

    def said(self, ended: bool = False) -> str:
        """A line for people; ``ended``: whether nothing can come any more."""
        if not self.calls:
            return "never reached"
        said = f"reached {self.calls:,} {'time' if self.calls == 1 else 'times'}"
        if not self.has_condition:
            return said
        if not self.asked:
            return f"{said}; whether the bug's condition held could not be told"
        of = "" if self.asked == self.calls else f" of the {self.asked:,} in which it could be told"
        if not self.held:
            end = "" if of else f": {'this run was not affected' if ended else 'not affected so far'}"
            return f"{said}, never with the bug's condition{of}{end}"
        return f"{said}, with the bug's condition in {self.held:,}{of}{self.by_how_much}"

    @property
    def by_how_much(self) -> str:
        """In brackets, where it is a number."""
        if self.least is None or self.most is None:
            return ""
        upto = f" to {self.most:.4g}" if self.most != self.least else ""
        return f" ({self.measure} {self.least:.4g}{upto})"

    def to_dict(self) -> dict[str, Any]:
        """In values that JSON has."""
        found: dict[str, Any] = {"calls": self.calls}
        if self.has_condition:
            found |= {"asked": self.asked, "held": self.held}
        if self.least is not None and self.most is not None:
            found |= {"least": finite(self.least), "most": finite(self.most), "measure": self.measure}
        return found


def in_all(found: Sequence[Reached]) -> Reached:
    """Of several places, or processes, together."""
    return Reached(
        sum(one.calls for one in found),
        sum(one.asked for one in found),
        sum(one.held for one in found),
        min((one.least for one in found if one.least is not None), default=None),
        max((one.most for one in found if one.most is not None), default=None),
        found[0].measure,
        found[0].has_condition,
    )


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
        return printable(f"changes numbers: {self.changes_numbers}")

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
        reached = (printable(str(self.reached)),) if self.reached is not None and self.reached.calls else ()
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

    def to_text(self, width: int | None = WIDTH, everything: bool = False, places: bool = False) -> str:
        """A table for people; `str` gives it as it is by default.

        Args:
            width: of its lines, in characters; None: no line is wrapped.
            everything: a line for each patch of what is not installed, too, instead of one for all of a framework.
            places: file and line of each function that runs with a patch, below it.
        """
        shown = [row for row in self.patches if everything or row.status is not Status.ABSENT]
        cells = [
            (row.name, row.status.value, printable(f"{row.distribution} {row.version or '-'}"), row.why)
            for row in shown
        ]
        lines = []
        if shown or not self.patches:
            lines = layout(
                ("PATCH", "STATUS", "FRAMEWORK", "REASON"), cells, width, [row.below(places) for row in shown]
            )
        lines += folded(row for row in self.patches if row not in shown)
        return "\n".join([*lines, *(printable(str(failure)) for failure in self.plugin_failures), *self.notes])

    def __str__(self) -> str:
        return self.to_text()

    # What an interpreter and a notebook show of `apply()` in their last line.
    __repr__ = __str__

    def _repr_html_(self) -> str:
        import html  # only in a notebook

        heads = ("patch", "status", "framework", "reason")
        rows = [
            (row.name, row.status.value, f"{row.distribution} {row.version or '-'}", row.why)
            for row in self.patches
            if row.status is not Status.ABSENT
        ]
        marked = [("th", heads)] * bool(rows) + [("td", row) for row in rows]
        table = "".join(
            f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>" for tag, cells in marked
        )
        more = [
            *folded(self.with_status(Status.ABSENT)),
            *(printable(str(failure)) for failure in self.plugin_failures),
            *self.notes,
        ]
        return f"<table>{table}</table>" + "".join(f"<div>{html.escape(line)}</div>" for line in more)


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


def plural(count: int, one: str, many: str = "") -> str:
    """A number of things: "1 patch", "2 patches"; without ``many`` their name takes an s."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def layout(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int | None,
    below: Sequence[Sequence[str]] = (),
) -> list[str]:
    """Rows in columns. Only the last cell is ever wrapped, no word is broken, and no line ends in blanks.

    Args:
        heads: the names of the columns.
        rows: their cells, each of one line.
        width: of a terminal or a log. Where the columns leave too little of it, the last cell goes below its row. None
            for a pipe: no cell is wrapped.
        below: lines to put below each row.
    """
    import textwrap  # only where a table is asked for

    columns = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads) - 1)]
    if width is None:
        columns = [min(size, _MOST) for size in columns]
    indent = sum(columns) + 2 * len(columns)
    stacked = width is not None and width - indent < _LEAST
    indent = _INDENT if stacked or width is None else indent
    lines = []
    for row, more in zip([heads, *rows], [(), *(below or [()] * len(rows))], strict=True):
        start = "  ".join(cell.ljust(size) for cell, size in zip(row, columns, strict=False))
        texts = [row[-1], *more]
        if width is not None:
            room = max(width - indent, _LEAST)
            wrapped = [textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) for text in texts]
            texts = [line for each in wrapped for line in each or [""]]
        if stacked and row is heads:
            texts = []
        elif not stacked:
            start += "  " + texts.pop(0)
        lines += [start.rstrip(), *(" " * indent + text for text in texts if text)]
    return lines
