"""What the engine keeps of each patch, and its row in the report."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ..definitions.listed import Listed
from ..definitions.reached import Reached
from ..definitions.status import PatchReport, Status, patch_report
from ..definitions.words import observed_text
from ..import_system import no_signal

if TYPE_CHECKING:
    from ..definitions.bug import KnownBug
    from .patched import Patched


class Outcome(NamedTuple):
    """What has become of a patch. One value, so that a status never stands beside the reason of another.

    ``waits`` has the modules whose import is waited for: any of these groups, as a whole; ``missed``: that of one was
    not noticed.
    """

    status: Status
    reason: str
    unreviewed: bool = False
    waits: tuple[tuple[str, ...], ...] = ()
    missed: bool = False


ON = (Status.APPLIED, Status.OBSERVED)
"""What has changed code, be it to count alone."""

FRESH = Outcome(Status.INACTIVE, "apply() has not been called")


class Entry:
    """A registered patch or advice and what has become of it."""

    def __init__(self, patch: KnownBug | Listed, plugin: str) -> None:
        self.patch = patch
        self.plugin = plugin
        self.requested = False
        self.named = False  # requested by its name, not by a glob or by all
        self.outcome = FRESH
        self.version: str | None = None


class NoLedger:
    """The ledger as long as no function was to be changed. A real one imports all that changing takes."""

    def in_force(self, name: str) -> bool:
        return False

    def matched(self, name: str) -> dict[str, str]:
        return {}

    def carrying(self, name: str) -> list[Patched]:
        return []

    def remove(self, name: str) -> list[str]:
        return []

    def undone(self, name: str) -> str | None:
        return None

    def reached(self, name: str) -> Reached | None:
        return None

    def start_anew(self) -> None:
        pass


def row(entry: Entry, places: tuple[str, ...] = (), reached: Reached | None = None) -> PatchReport:
    status, reason, unreviewed, *_ = entry.outcome
    return patch_report(entry.patch, entry.plugin, status, reason, entry.version, unreviewed, places, reached)


def with_observations(row: PatchReport, patch: KnownBug | Listed) -> PatchReport:
    """The row of an applied patch, with what the patch says it has done so far."""
    if row.status is not Status.APPLIED:
        return row
    observations: str | None = getattr(patch, "observations", None)
    module_name, _, function = (observations or "").partition(":")
    module = sys.modules.get(module_name)
    if module is None:
        return row
    try:
        found = dict(getattr(module, function)())
    except no_signal(Exception) as error:  # a report must not fail for this
        return replace(row, reason=f"{row.reason}; {observations} failed: {type(error).__name__}: {error}")
    if not found:
        return row
    said = ", ".join(f"{what}: {observed_text(value)}" for what, value in found.items())
    return replace(row, reason=f"{row.reason}; observed: {said}", observations=found)
