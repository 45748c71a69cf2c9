"""Applies and reverts patches, and logs the results. `ledger` changes the functions.

One lock guards all changes of functions. Nothing is imported under it: an import hook runs while Python holds import
locks, and a thread that holds our lock while it waits for an import lock would deadlock.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from .. import settings
from ..definitions.listed import Listed
from ..definitions.registry import PluginFailure
from ..definitions.status import PatchError, PatchReport, Report, Status
from ..definitions.words import printable
from ..guards import memory
from ..import_system import no_signal
from . import exit_status, import_hooks
from .entries import ON, Entry, row, with_observations
from .log import announce, ended
from .turn import Turn

if TYPE_CHECKING:
    from ..definitions.bug import KnownBug

Names = Iterable[str] | str | None


class Asked(NamedTuple):
    """The requests so far. ``chosen`` is None before `apply`; ``hint`` ends an error about an unknown name.

    ``contested``: the positions on contested patches, by name; ``named``: those of them that `apply` enabled by name.
    """

    names: tuple[str, ...]
    chosen: tuple[str, ...] | None
    strict: bool | None
    hint: str
    contested: Mapping[str, str]
    named: tuple[str, ...]


class Engine(Turn):
    """The engine of one process. Use the functions of `rlhf_patches`, which share one engine."""

    # ------------------------------------------------------------------------------------- public calls

    @memory.parsed_once(kept=math.inf)
    def apply(self, only: Names = None, disable: Names = None, strict: bool | None = None) -> Report:
        """See `rlhf_patches.apply`."""
        entries = self._registered()
        names = list(entries)
        only = list(only) if isinstance(only, Iterable) and not isinstance(only, str) else only  # read twice
        selected = set(names if only is None else settings.expand(only, names, "only", self._hint()))
        by_name = {only} if isinstance(only, str) else set(only or ())
        disabled = set(settings.expand(disable, names, "disable", self._hint()))
        environment = self._settings()  # a wrong variable is an error before anything changes
        self._resolve_implementations([entries[name] for name in selected - disabled])
        with self._lock:
            self._strict, self._called = strict, True
            for name, entry in entries.items():
                if name in selected and name not in disabled:
                    entry.requested = True
                    entry.named = entry.named or name in by_name
                elif not entry.requested:
                    why = "disabled by apply(disable=...)" if name in disabled else "not chosen by apply(only=...)"
                    entry.outcome = self._switch_off(name, why)
        for module in dict.fromkeys(m for e in entries.values() if e.requested for m in e.patch.modules):
            import_hooks.watch(module, self._imported)
        for entry in entries.values():
            self._attempt(entry, None)
        report = self.report()
        self._say(report.patches, report.plugin_failures, raising=environment.strict if strict is None else strict)
        return report

    def revert(self, only: Names = None, keep: Names = None) -> Report:
        """See `rlhf_patches.revert`."""
        entries = self._registered()
        names = list(entries)
        chosen = set(names if only is None else settings.expand(only, names, "only", self._hint()))
        chosen -= set(settings.expand(keep, names, "keep", self._hint()))
        with self._lock:
            for name in chosen:
                entry = entries[name]
                if entry.requested or self._ledger.carrying(name):  # an earlier call may have failed to revert it
                    entry.requested = entry.named = False
                    entry.outcome = self._switch_off(name, "reverted by revert()")
            self._unwatch(entries[name] for name in chosen)
        self.on_change()
        return self.report()

    def report(self) -> Report:
        """See `rlhf_patches.report`."""
        entries = self._registered()
        with self._lock:
            for entry in entries.values():
                self._look_again(entry)
            rows = [(self._row_with_places(entry), entry.patch) for entry in entries.values()]
            failures = tuple(self._failures)
        # Not under the lock: it runs the patch's own code.
        return Report(tuple(with_observations(row, patch) for row, patch in rows), failures)

    @property
    def is_called(self) -> bool:
        """Whether `apply` has been called."""
        return self._called

    def end(self) -> None:
        """At exit, log the verdict; in strict mode, exit with 120 if an import bypassed the hooks."""
        entries = (self._entries or {}).values()
        with self._lock:
            for entry in entries:
                self._look_again(entry)
            missed = [row(entry) for entry in entries if entry.outcome.missed]
            rows = [self._row_with_places(entry) for entry in entries]
        with contextlib.suppress(Exception):  # the user's logging handler may raise
            ended(rows)
        if not missed:
            return
        self.on_change()
        if not self._is_strict():
            announce(missed)
            return
        problems = "; ".join(f"{row.name} was {row.status}: {row.reason}" for row in missed)
        with contextlib.suppress(Exception):  # standard error may be closed
            sys.stderr.write(f"[rlhf_patches] strict mode: {printable(problems)}\n")
        exit_status.fail()

    def _row_with_places(self, entry: Entry) -> PatchReport:
        """Return the row with ``file:line`` of each function that carries the patch, and the call counts."""
        name = entry.patch.name
        if entry.outcome.status is Status.ADVICE:
            return row(entry, reached=self._ledger.reached(name))
        if entry.outcome.status not in ON:
            return row(entry)
        places = (f"{item.source.filename}:{item.place.lineno}" for item in self._ledger.carrying(name))
        return row(entry, tuple(dict.fromkeys(places)), self._ledger.reached(name))

    # ------------------------------------------------------------------- called within training, without locks

    def in_force(self, name: str) -> bool:
        """See `rlhf_patches.in_force`."""
        self._known(name, "in_force")
        return self._ledger.in_force(name)

    def may_be_there(self, name: str) -> bool:
        """Whether this process may have the bug: no patch for it is in force, and the framework may be affected."""
        status = self._known(name, "may_be_there").outcome.status
        return status not in (Status.UNAFFECTED, Status.ABSENT) and not self._ledger.in_force(name)

    def matched(self, name: str, target: str) -> str:
        """See `rlhf_patches.matched`."""
        fingerprint = self._ledger.matched(name).get(target)
        if fingerprint is not None:
            return fingerprint
        patch = self._define(self._known(name, "matched"))
        from ..definitions.changes import Replace, Wrap  # which the patch has imported

        changes = [change for variant in patch.variants for change in variant.changes]
        targets = [change.target for change in changes if isinstance(change, (Replace, Wrap)) and change.fingerprints]
        if target not in targets:
            raise settings.SettingsError(
                f"matched: {target!r} is not a target of {name} with fingerprints"
                f"{settings.nearest(target, list(dict.fromkeys(targets)))}"
            )
        raise PatchError(f"{name} has not been applied to {target} in this process, so no fingerprint was matched")

    # --------------------------------------------------------------------------- one patch alone, for tests

    def definition(self, name: str) -> KnownBug:
        """Import and return a registered patch or advice.

        Raises:
            SettingsError: there is no patch of this name.
        """
        return self._define(self._known(name, "the test"))

    @contextlib.contextmanager
    def set_apart(self, patch: KnownBug) -> Iterator[None]:
        """Disable a patch within the context, so that `switch` can enable it; restore its state afterwards.

        A patch that was not registered is removed afterwards. Other patches are not affected.

        Raises:
            SettingsError: another patch is registered under its name, or other code prevents its removal.
        """
        entries = self._registered()
        registered = entries.get(patch.name)
        if registered is not None and self._define(registered) != patch:
            raise settings.SettingsError(
                f"{registered.plugin} registers {patch} with a different definition. Is an older version installed? "
                "`pip install -e .` installs the working tree's"
            )
        entry = registered or Entry(patch, "a test")
        before = entry.requested, entry.outcome, entry.version
        named = entry.named
        self._entries = {**entries, patch.name: entry}
        try:
            if self.switch(patch.name, on=False).status is Status.FAILED:
                raise settings.SettingsError(f"{patch} cannot be tested: {entry.outcome.reason}")
            yield
        finally:
            self.switch(patch.name, on=False)
            if registered is None:
                self._entries = {name: each for name, each in self._entries.items() if each is not entry}
            elif before[0]:
                self.switch(patch.name, on=True, by_name=named)
            else:
                entry.requested, entry.outcome, entry.version = before
                entry.named = named

    @memory.parsed_once(kept=math.inf)
    def switch(self, name: str, on: bool, by_name: bool = True) -> PatchReport:
        """Apply or revert one patch, without a log line and without an error in strict mode.

        Args:
            name: the patch.
            on: whether to apply it.
            by_name: whether a contested patch counts as enabled by its name.

        Returns:
            the patch's row in the report.
        """
        entry = self._known(name, "the test")
        if on:
            self._resolve_implementations([entry])
        with self._lock:
            entry.requested, entry.named = on, on and by_name
            if not on:
                entry.outcome = self._switch_off(name, "reverted by a test")
                self._unwatch([entry])
        if on:
            for module in entry.patch.modules:
                import_hooks.watch(module, self._imported)
            self._attempt(entry, None)
        return self._row_with_places(entry)

    # ---------------------------------------------------------------------------------- for other processes

    def asked(self) -> Asked:
        """Return what the callers of `apply` and `revert` have requested so far, whatever the result."""
        entries = self._registered()
        with self._lock:
            chosen = tuple(name for name, entry in entries.items() if entry.requested) if self._called else None
            contested = {name: entry.patch.contested for name, entry in entries.items() if entry.patch.contested}
            named = tuple(name for name in contested if entries[name].named)
            return Asked(tuple(entries), chosen, self._strict, self._hint(), contested, named)

    def carried(self) -> list[tuple[KnownBug | Listed, PatchReport, dict[str, str]]]:
        """Return each patch, its row in the report, and the text of each module that it has been applied to.

        A patch stays `Listed` if its framework is absent or if it cannot be imported. No module of a framework is
        imported, and nothing is changed.
        """
        entries = self._registered()
        for entry in entries.values():
            if entry.outcome.status is not Status.ABSENT:
                try:
                    self._define(entry)
                except no_signal(Exception, SystemExit):  # reported when it is applied
                    pass
        with self._lock:
            for entry in entries.values():
                self._look_again(entry)
            return [
                (
                    entry.patch,
                    row(entry),
                    {p.source.module: p.source.text for p in self._ledger.carrying(entry.patch.name)},
                )
                for entry in entries.values()
            ]

    # ------------------------------------------------------------------------------------------- set-up

    # ------------------------------------------------------------------------------------ one patch's turn

    @memory.parsed_once(kept=math.inf)
    def _imported(self, module_name: str, module: ModuleType) -> None:
        """Handle the import or reload of a watched module. Raises only in strict mode."""
        entries = [e for e in (self._entries or {}).values() if e.requested and module_name in e.patch.modules]
        with contextlib.suppress(settings.SettingsError):  # part of each entry's reason
            self._settings()  # before the lock is taken: an error about a name imports difflib
        self._resolve_implementations(entries)
        for entry in entries:
            self._attempt(entry, module)
        self._say([self._row_with_places(entry) for entry in entries], (), raising=self._is_strict())

    # ------------------------------------------------------------------------------- changing functions

    def _unwatch(self, entries: Iterable[Entry]) -> None:
        """Stop waiting for modules that no requested patch needs."""
        needed = {m for e in (self._entries or {}).values() if e.requested for m in e.patch.modules}
        for module in {m for e in entries for m in e.patch.modules} - needed:
            import_hooks.unwatch(module, self._imported)

    # ------------------------------------------------------------------------------------ logging

    def _say(self, rows: Iterable[PatchReport], failures: Iterable[PluginFailure], raising: bool) -> None:
        rows, failures = tuple(rows), tuple(failures)
        self.on_change()
        announce(rows, failures)
        lines = [f"{row.name} was {row.status}: {row.reason}" for row in rows if row.is_problem]
        lines += [str(failure) for failure in failures]
        if raising and lines:
            raise PatchError("strict mode: " + "; ".join(lines))


engine = Engine()
"""The engine of this process, used by the functions of `rlhf_patches`."""
