"""The engine's record of each patch, and its row in the report."""

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
    """The outcome for a patch. It is one value, so status and reason always belong together.

    ``waits``: groups of modules; the patch waits until all modules of one group are imported. ``missed``: the hooks
    missed an import.
    """

    status: Status
    reason: str
    unreviewed: bool = False
    waits: tuple[tuple[str, ...], ...] = ()
    missed: bool = False


ON = (Status.APPLIED, Status.OBSERVED)
"""The statuses that change code, if only to count calls."""

FRESH = Outcome(Status.INACTIVE, "apply() has not been called")


class Entry:
    """A registered patch or advice and its outcome."""

    def __init__(self, patch: KnownBug | Listed, plugin: str) -> None:
        self.patch = patch
        self.plugin = plugin
        self.requested = False
        self.named = False  # requested by its name, not by a glob or by all
        self.outcome = FRESH
        self.version: str | None = None


class NoLedger:
    """The ledger before the first change. A real ledger imports all that a change requires."""

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
    """Return the row of an applied patch with the patch's observations so far."""
    if row.status is not Status.APPLIED:
        return row
    observations: str | None = getattr(patch, "observations", None)
    module_name, _, function = (observations or "").partition(":")
    module = sys.modules.get(module_name)
    if module is None:
        return row
    try:
        values = dict(getattr(module, function)())
    except no_signal(Exception) as error:  # a report must not fail because of a patch
        return replace(row, reason=f"{row.reason}; {observations} failed: {type(error).__name__}: {error}")
    if not values:
        return row
    texts = ", ".join(f"{what}: {observed_text(value)}" for what, value in values.items())
    return replace(row, reason=f"{row.reason}; observed: {texts}", observations=values)
