"""The state of one process: the entries, the settings, the ledger, and the imported implementations."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .. import settings
from ..definitions import registry
from ..definitions.listed import Listed
from ..definitions.registry import PluginFailure
from ..definitions.status import Status
from ..guards import memory
from ..import_system import no_signal
from .entries import ON, Entry, NoLedger, Outcome
from .locks import LoadingLock, Lock
from .modules import is_ready

if TYPE_CHECKING:
    from ..definitions.bug import KnownBug
    from .ledger import Ledger


class State:
    """The state of one process."""

    def __init__(
        self, load: Callable[[], tuple[Sequence[tuple[KnownBug | Listed, str]], list[PluginFailure]]] = registry.listed
    ) -> None:
        self._load = load
        self.on_change: Callable[[], None] = _ignore
        """Called after the status of patches may have changed, never under the lock; must not raise."""
        self._lock, self._loading, self._is_loading = Lock(), LoadingLock(), False
        self._entries: dict[str, Entry] | None = None
        self._failures: list[PluginFailure] = []
        self._ledger: Ledger | NoLedger = NoLedger()
        self._resolved: dict[str, Callable[..., Any] | BaseException] = {}
        self._strict: bool | None = None
        self._called = self._has_begun = False
        os.register_at_fork(after_in_child=self._start_anew)

    def _registered(self) -> dict[str, Entry]:
        with self._loading:
            if self._entries is None:
                if self._is_loading:
                    raise RuntimeError("rlhf_patches was called while it loads its plugins; a plugin must not call it")
                self._is_loading = True
                try:
                    registered, self._failures = self._load()
                finally:
                    self._is_loading = False
                self._entries = {patch.name: Entry(patch, plugin) for patch, plugin in registered}
            return self._entries

    def _hint(self) -> str:
        return registry.hint(self._failures)

    def _start_anew(self) -> None:
        # A child must not inherit a lock that another thread of the parent held at the fork.
        self._lock, self._loading = Lock(), LoadingLock()
        self._is_loading = False
        self._ledger.start_anew()

    def _resolve_implementations(self, entries: Iterable[Entry]) -> None:
        """Import the implementations of patches whose targets are already imported, before the lock is taken."""
        for entry in entries:
            # Of several variants, the right one is not known yet, and the others' may not be importable.
            patch = entry.patch
            if isinstance(patch, Listed) or len(patch.variants) > 1:
                continue
            if all(module in sys.modules for module in patch.modules):
                self._resolve_all(patch.implementations)

    def _resolve_all(self, paths: Iterable[str]) -> None:
        for path in paths:
            self._resolve(path)

    def _resolve(self, path: str) -> Callable[..., Any] | BaseException:
        if path not in self._resolved or isinstance(self._resolved[path], BaseException):
            module, _, qualname = path.partition(":")
            try:
                implementation = functools.reduce(getattr, qualname.split("."), importlib.import_module(module))
                self._resolved[path] = implementation  # type: ignore[assignment]
            except no_signal(Exception, SystemExit) as error:
                self._resolved[path] = error
        return self._resolved[path]

    def _implementation(self, path: str) -> Callable[..., Any]:
        """Return an implementation that was imported before the lock was taken; raise the exception of its import."""
        from ..guards import implementations

        resolved = self._resolved[path]
        if isinstance(resolved, BaseException):
            raise (isinstance(resolved, Exception) and implementations.missing(path, resolved)) or resolved
        return resolved

    def _settings(self) -> settings.Settings:
        """Return the settings of the current environment, read once per `apply` and once per import."""
        assert self._entries is not None
        names = list(self._entries)
        return memory.remembered(("settings", self), lambda: settings.from_environment(names, self._hint()), small=True)

    def _define(self, entry: Entry) -> KnownBug:
        """Import a patch that is only listed."""
        patch = entry.patch = entry.patch.load() if isinstance(entry.patch, Listed) else entry.patch
        return patch

    def _known(self, name: str, what: str) -> Entry:
        entries = self._entries or self._registered()
        if name not in entries:
            raise settings.SettingsError(
                f"{what} names {name!r}, which is not a patch{settings.nearest(str(name), list(entries))}{self._hint()}"
            )
        return entries[name]

    def _switch_off(self, name: str, why: str) -> Outcome:
        """Remove a patch from every function, and return the outcome."""
        lost = self._ledger.remove(name)
        if lost:
            reason = f"{why}, but not reverted: other code has changed {', '.join(lost)} after it was patched"
            return Outcome(Status.FAILED, reason)
        return Outcome(Status.DISABLED, why)

    def _look_again(self, entry: Entry) -> None:
        """Check whether an applied patch still runs, and whether a pending patch has missed its import."""
        status = entry.outcome.status
        missed = next((group for group in entry.outcome.waits if all(map(is_ready, group))), None)
        if missed:
            reason = f"{', '.join(missed)} was imported without the import hooks; call apply() again"
            entry.outcome = Outcome(Status.FAILED, reason, missed=True)
            return
        if status not in ON:
            return
        undone = self._ledger.undone(entry.patch.name)
        if not self._ledger.carrying(entry.patch.name):
            entry.outcome = Outcome(Status.DISABLED, "reverted by an interrupted revert()")
        elif undone:
            entry.outcome = Outcome(Status.FAILED, undone)

    def _is_strict(self) -> bool:
        try:
            return self._strict if self._strict is not None else settings.truth("STRICT")
        except settings.SettingsError:  # already in each entry's reason
            return False


def _ignore() -> None:
    pass
