"""What was done, patch by patch: as a table, a dictionary, JSON, or flat values for an experiment tracker."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .patch import Listed, Patch
from .registry import PluginFailure, credit


class Status(str, enum.Enum):
    """What became of a patch. Only APPLIED means that code was changed."""

    PENDING = "pending"
    """Not imported yet; it will be applied on import if the guards hold then."""
    APPLIED = "applied"
    """The function runs with the patch."""
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
    APPLIES = "applies"
    """Only from static inspection: the installed source is affected and recognised."""

    def __str__(self) -> str:
        return self.value

    @property
    def is_problem(self) -> bool:
        """Whether a user has to look at it: the bug may be there, and it is not repaired."""
        return self in (Status.REFUSED, Status.FAILED)


_ACTING = (Status.PENDING, Status.APPLIED, Status.APPLIES)


def printable(text: str) -> str:
    """Text from outside as one line: it must not move the cursor, nor be what no terminal can encode."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


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
    changes_numbers: str | None = None
    """What `Patch.changes_numbers` says, on one line, where the framework is there, applied or not."""

    @property
    def needs_attention(self) -> bool:
        """Whether the log says it as a warning: the bug may be there, and it is not repaired."""
        return self.status.is_problem or self.unreviewed

    @property
    def why(self) -> str:
        """The reason, and the plugin that brings the patch where it is not built-in: a line for people."""
        return printable(f"{' '.join(self.reason.split())}{credit(self.plugin)}".lstrip())

    @property
    def notice(self) -> str:
        """A line for people beside `why`, where the patch changes numbers and is applied or would be; else empty."""
        if self.changes_numbers is None or self.status not in _ACTING:
            return ""
        return printable(f"changes numbers: {self.changes_numbers}")

    def to_dict(self) -> dict[str, Any]:
        """The stable JSON form: name, status, reason, distribution, version, guard, plugin.

        And ``unreviewed`` where it is true, ``observations`` and ``changes_numbers`` where there are any.
        """
        unreviewed = {"unreviewed": True} if self.unreviewed else {}
        observations = {"observations": dict(self.observations)} if self.observations else {}
        changes_numbers = {"changes_numbers": self.changes_numbers} if self.changes_numbers else {}
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
            **changes_numbers,
        }


def patch_report(
    patch: Patch | Listed, plugin: str, status: Status, reason: str, version: str | None, unreviewed: bool = False
) -> PatchReport:
    """A patch's state together with what the patch says about itself."""
    changes_numbers = patch.changes_numbers if isinstance(patch, Patch) and status is not Status.ABSENT else None
    return PatchReport(
        name=patch.name,
        status=status,
        reason=reason,
        distribution=patch.distribution,
        version=version,
        guard=patch.versions,
        plugin=plugin,
        unreviewed=unreviewed,
        changes_numbers=changes_numbers and " ".join(changes_numbers.split()),
    )


@dataclass(frozen=True)
class Report:
    """The state of every registered patch, and the plugins that could not be loaded."""

    patches: tuple[PatchReport, ...]
    plugin_failures: tuple[PluginFailure, ...] = ()

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
        """Refused and failed patches."""
        return tuple(patch for patch in self.patches if patch.status.is_problem)

    def to_dict(self) -> dict[str, Any]:
        """Everything, in values that JSON has."""
        return {
            "patches": [patch.to_dict() for patch in self.patches],
            "plugin_failures": [{"plugin": f.plugin, "reason": f.reason} for f in self.plugin_failures],
        }

    def to_json(self, **options: Any) -> str:
        """`to_dict` as JSON text; options go to `json.dumps`."""
        import json  # only where it is asked for

        return json.dumps(self.to_dict(), **options)

    def to_flat_dict(self, prefix: str = "rlhf_patches/") -> dict[str, str]:
        """One short string per patch, as experiment trackers like it: ``{"rlhf_patches/NAME": "applied"}``."""
        return {prefix + patch.name: patch.status.value for patch in self.patches}

    def __str__(self) -> str:
        return table(self.patches, self.plugin_failures)


def table(patches: tuple[PatchReport, ...], failures: tuple[PluginFailure, ...] = (), width: int = 130) -> str:
    """A readable table of fixed width, for logs and terminals alike."""
    import textwrap  # only where a table is asked for

    heads = ("PATCH", "STATUS", "FRAMEWORK", "REASON")
    rows = []
    for p in patches:
        rows.append((p.name, p.status.value, printable(f"{p.distribution} {p.version or '-'}"), p.why))
        rows += [("", "", "", p.notice)] if p.notice else []
    columns = [max(len(row[i]) for row in [heads, *rows]) for i in range(3)]
    indent = sum(columns) + 6
    lines = []
    for row in [heads, *rows]:
        start = "  ".join(cell.ljust(size) for cell, size in zip(row, columns, strict=False)) + "  "
        reason = textwrap.wrap(row[3], max(width - indent, 40), break_long_words=False, break_on_hyphens=False) or [""]
        lines.append((start + reason[0]).rstrip())
        lines += [" " * indent + more for more in reason[1:]]
    lines += [printable(str(failure)) for failure in failures]
    return "\n".join(lines)
