"""Applying and reverting: which patch, when, and what is said about it. `ledger` changes the functions.

Everything that changes functions happens under one lock. Nothing is imported under it: an import hook runs
while Python holds import locks, and a thread that held ours while waiting for one of those would deadlock.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import os
import sys
from _thread import RLock
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import exit_status, settings
from ..definitions import registry
from ..definitions.listed import WATCH, Listed
from ..definitions.registry import PluginFailure
from ..definitions.status import (
    PatchError,
    PatchReport,
    Reached,
    Report,
    Status,
    observed_text,
    patch_report,
    printable,
)
from ..guards import choices, rewriting, sources
from ..guards.choices import Choice, Decision
from ..guards.sources import Source, Unreadable
from ..guards.versions import Finding, Verdict
from ..import_system import no_signal
from . import import_hooks
from .log import acted, announce, logger, speaks

if TYPE_CHECKING:
    from ..definitions.listed import ListedVariant
    from ..definitions.patch import Condition, KnownBug, Variant
    from .ledger import Ledger, Patched

Names = Iterable[str] | str | None

PATIENCE = 60.0
"""Seconds for which one thread waits for another; each holds a lock for milliseconds, or while plugins are imported."""


class _NotReady(Exception):
    """Something has to be imported first, which is not done under the lock."""

    def __init__(self, load: Callable[[], object]) -> None:
        super().__init__(load)
        self.load = load


class _Stuck(RuntimeError):
    """Another thread has held a lock for so long that it will hold it for good."""


class _Lock(RLock):  # type: ignore[misc]
    """A lock of threads that is not waited for without end: a framework's import is behind it, and may be a rank's."""

    what = "changing functions"
    patience: float | None = None

    def __enter__(self) -> bool:  # type: ignore[override]
        if not self.acquire(timeout=PATIENCE if self.patience is None else self.patience):
            self.patience = 0.0  # nobody waits a second time
            raise _Stuck(f"another thread has been {self.what} for {PATIENCE:.0f} s")
        self.patience = None
        return True


class _LoadingLock(_Lock):  # type: ignore[misc]
    what = "loading the patches"


class _Outcome(NamedTuple):
    """What has become of a patch. One value, so that a status never stands beside the reason of another.

    ``waits`` has the modules whose import is waited for: any of these groups, as a whole; ``missed``: that of one was
    not noticed.
    """

    status: Status
    reason: str
    unreviewed: bool = False
    waits: tuple[tuple[str, ...], ...] = ()
    missed: bool = False


_ON = (Status.APPLIED, Status.OBSERVED)
"""What has changed code, be it to count alone."""

_FRESH = _Outcome(Status.INACTIVE, "apply() has not been called")


class _Entry:
    """A registered patch or advice and what has become of it."""

    def __init__(self, patch: KnownBug | Listed, plugin: str) -> None:
        self.patch = patch
        self.plugin = plugin
        self.requested = False
        self.named = False  # requested by its name, not by a glob or by all
        self.outcome = _FRESH
        self.version: str | None = None


class _Nothing:
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


class Asked(NamedTuple):
    """``chosen`` is None as long as `apply` has not been called; ``hint`` ends an error about an unknown name.

    ``contested``: by name, who holds what of those that upstream contests; ``named``: those of them that `apply` was
    asked for by their names.
    """

    names: tuple[str, ...]
    chosen: tuple[str, ...] | None
    strict: bool | None
    hint: str
    contested: Mapping[str, str]
    named: tuple[str, ...]


class Engine:
    """The state of one process. Use the functions of `rlhf_patches`; there is one engine behind them."""

    def __init__(
        self, load: Callable[[], tuple[Sequence[tuple[KnownBug | Listed, str]], list[PluginFailure]]] = registry.listed
    ) -> None:
        self._load = load
        self.on_change: Callable[[], None] = _ignore
        """Called after patches may have changed their states, never under the lock; must not raise."""
        self._lock, self._loading, self._is_loading = _Lock(), _LoadingLock(), False
        self._entries: dict[str, _Entry] | None = None
        self._failures: list[PluginFailure] = []
        self._ledger: Ledger | _Nothing = _Nothing()
        self._resolved: dict[str, Callable[..., Any] | BaseException] = {}
        self._strict: bool | None = None
        self._called = False
        os.register_at_fork(after_in_child=self._start_anew)

    # ------------------------------------------------------------------------------------- public calls

    @sources.parsed_once(kept=math.inf)
    def apply(self, only: Names = None, exclude: Names = None, strict: bool | None = None) -> Report:
        """See `rlhf_patches.apply`."""
        entries = self._registered()
        names = list(entries)
        only = list(only) if isinstance(only, Iterable) and not isinstance(only, str) else only  # read twice
        selected = set(names if only is None else settings.expand(only, names, "only", self._hint()))
        by_name = {only} if isinstance(only, str) else set(only or ())
        excluded = set(settings.expand(exclude, names, "exclude", self._hint()))
        environment = self._settings()  # a wrong variable is an error before anything changes
        self._resolve_implementations([entries[name] for name in selected - excluded])
        with self._lock:
            self._strict, self._called = strict, True
            for name, entry in entries.items():
                if name in selected and name not in excluded:
                    entry.requested = True
                    entry.named = entry.named or name in by_name
                elif not entry.requested:
                    why = "excluded by apply(exclude=...)" if name in excluded else "not chosen by apply(only=...)"
                    entry.outcome = self._switch_off(name, why)
        for module in dict.fromkeys(m for e in entries.values() if e.requested for m in e.patch.modules):
            import_hooks.watch(module, self._imported)
        for entry in entries.values():
            self._attempt(entry, None)
        report = self.report()
        self._say(report.patches, report.plugin_failures, raising=environment.strict if strict is None else strict)
        return report

    def revert(self, only: Names = None, exclude: Names = None) -> Report:
        """See `rlhf_patches.revert`."""
        entries = self._registered()
        names = list(entries)
        chosen = set(names if only is None else settings.expand(only, names, "only", self._hint()))
        chosen -= set(settings.expand(exclude, names, "exclude", self._hint()))
        with self._lock:
            for name in chosen:
                entry = entries[name]
                if entry.requested or self._ledger.carrying(name):  # an earlier call may not have got it off
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
        # Not under the lock: it is the patch's own code.
        return Report(tuple(_with_observations(row, patch) for row, patch in rows), failures)

    @property
    def is_called(self) -> bool:
        """Whether `apply` has been called."""
        return self._called

    def end(self) -> None:
        """At the end of the process: what was imported past the hooks is said, and in strict mode ends it with 120."""
        entries = (self._entries or {}).values()
        with self._lock:
            for entry in entries:
                self._look_again(entry)
            missed = [_row(entry) for entry in entries if entry.outcome.missed]
        if not missed:
            return
        self.on_change()
        if not self._is_strict():
            announce(missed)
            return
        said = "; ".join(f"{row.name} was {row.status}: {row.reason}" for row in missed)
        with contextlib.suppress(Exception):  # standard error may be closed
            sys.stderr.write(f"[rlhf_patches] strict mode, and {printable(said)}\n")
        exit_status.fail()

    def _is_strict(self) -> bool:
        try:
            return self._strict if self._strict is not None else settings.truth("STRICT")
        except settings.SettingsError:  # already part of each entry's reason
            return False

    def _row_with_places(self, entry: _Entry) -> PatchReport:
        """With ``file:line`` of each function that carries an applied patch, and how often these were entered."""
        if entry.outcome.status not in _ON:
            return _row(entry)
        name = entry.patch.name
        places = (f"{item.source.filename}:{item.place.lineno}" for item in self._ledger.carrying(name))
        return _row(entry, tuple(dict.fromkeys(places)), self._ledger.reached(name))

    # ------------------------------------------------------------------- asked within training, without locks

    def in_force(self, name: str) -> bool:
        """See `rlhf_patches.in_force`."""
        self._known(name, "in_force")
        return self._ledger.in_force(name)

    def may_be_there(self, name: str) -> bool:
        """Whether a bug may be in this process: no patch for it is in force, nor is it known that nothing has it."""
        status = self._known(name, "may_be_there").outcome.status
        return status not in (Status.UNAFFECTED, Status.ABSENT) and not self._ledger.in_force(name)

    def matched(self, name: str, target: str) -> str:
        """See `rlhf_patches.matched`."""
        found = self._ledger.matched(name).get(target)
        if found is not None:
            return found
        patch = self._define(self._known(name, "matched"))
        from ..definitions.patch import Replace, Wrap  # which the patch has imported

        changes = [change for variant in patch.variants for change in variant.changes]
        targets = [change.target for change in changes if isinstance(change, (Replace, Wrap)) and change.fingerprints]
        if target not in targets:
            raise settings.SettingsError(
                f"matched names {target!r}, which is no target of {name} with fingerprints"
                f"{settings.nearest(target, list(dict.fromkeys(targets)))}"
            )
        raise PatchError(f"{name} has not been applied to {target} in this process, so no fingerprint was matched")

    def _known(self, name: str, what: str) -> _Entry:
        entries = self._entries or self._registered()
        if name not in entries:
            raise settings.SettingsError(
                f"{what} names {name!r}, which is no patch{settings.nearest(str(name), list(entries))}{self._hint()}"
            )
        return entries[name]

    # --------------------------------------------------------------------------- one patch by itself, for tests

    def definition(self, name: str) -> KnownBug:
        """A registered patch or advice, imported.

        Raises:
            SettingsError: there is none of this name.
        """
        return self._define(self._known(name, "the test"))

    @contextlib.contextmanager
    def set_apart(self, patch: KnownBug) -> Iterator[None]:
        """Have a patch off, for `switch` to put on; at the end it is as it was, and gone if it was not registered.

        Every other patch stays as it is.

        Raises:
            SettingsError: another one is registered under its name, or other code keeps it from being taken off.
        """
        entries = self._registered()
        registered = entries.get(patch.name)
        if registered is not None and self._define(registered) != patch:
            raise settings.SettingsError(
                f"{patch} is registered by {registered.plugin}, which defines it otherwise: expected the same one. Is "
                "an older version installed? `pip install -e .` has the one of the working tree"
            )
        entry = registered or _Entry(patch, "a test")
        before = entry.requested, entry.outcome, entry.version
        named = entry.named
        self._entries = {**entries, patch.name: entry}
        try:
            if self.switch(patch.name, on=False).status is Status.FAILED:
                raise settings.SettingsError(f"{patch} cannot be tried: {entry.outcome.reason}")
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

    @sources.parsed_once(kept=math.inf)
    def switch(self, name: str, on: bool, by_name: bool = True) -> PatchReport:
        """Put on or take off one patch, and nothing else: no line in the log, and no error under strict mode.

        Args:
            name: the patch.
            on: whether to put it on.
            by_name: whether that counts as asked for by its name, where upstream contests it.

        Returns:
            its row in the report.
        """
        entry = self._known(name, "the test")
        if on:
            self._resolve_implementations([entry])
        with self._lock:
            entry.requested, entry.named = on, on and by_name
            if not on:
                entry.outcome = self._switch_off(name, "taken off by a test")
                self._unwatch([entry])
        if on:
            for module in entry.patch.modules:
                import_hooks.watch(module, self._imported)
            self._attempt(entry, None)
        return self._row_with_places(entry)

    # ---------------------------------------------------------------------------------- for other processes

    def asked(self) -> Asked:
        """What the callers of `apply` and `revert` have asked for so far, whatever became of it."""
        entries = self._registered()
        with self._lock:
            chosen = tuple(name for name, entry in entries.items() if entry.requested) if self._called else None
            contested = {name: entry.patch.contested for name, entry in entries.items() if entry.patch.contested}
            named = tuple(name for name in contested if entries[name].named)
            return Asked(tuple(entries), chosen, self._strict, self._hint(), contested, named)

    def carried(self) -> list[tuple[KnownBug | Listed, PatchReport, dict[str, str]]]:
        """Each patch, its row in the report, and the text of each module that it has been applied to.

        A patch stays listed where its framework is absent, and where it cannot be imported. No module of a framework is
        imported, and nothing changed.
        """
        entries = self._registered()
        for entry in entries.values():
            if entry.outcome.status is not Status.ABSENT:
                try:
                    self._define(entry)
                except no_signal(Exception, SystemExit):  # said when it is to be applied
                    pass
        with self._lock:
            for entry in entries.values():
                self._look_again(entry)
            return [
                (
                    entry.patch,
                    _row(entry),
                    {p.source.module: p.source.text for p in self._ledger.carrying(entry.patch.name)},
                )
                for entry in entries.values()
            ]

    # ------------------------------------------------------------------------------------------- set-up

    def _registered(self) -> dict[str, _Entry]:
        with self._loading:
            if self._entries is None:
                if self._is_loading:
                    raise RuntimeError("rlhf_patches was called while it loads its plugins; a plugin must not call it")
                self._is_loading = True
                try:
                    registered, self._failures = self._load()
                finally:
                    self._is_loading = False
                self._entries = {patch.name: _Entry(patch, plugin) for patch, plugin in registered}
            return self._entries

    def _hint(self) -> str:
        return registry.hint(self._failures)

    def _start_anew(self) -> None:
        # A child must not inherit a lock that another thread of the parent held while it forked.
        self._lock, self._loading = _Lock(), _LoadingLock()
        self._is_loading = False
        self._ledger.start_anew()

    def _resolve_implementations(self, entries: Iterable[_Entry]) -> None:
        """Import the implementations of patches whose targets are there already, before the lock is taken."""
        for entry in entries:
            # Which of several variants it is has not been decided yet, and the others' may not be importable here.
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
                found = functools.reduce(getattr, qualname.split("."), importlib.import_module(module))
                self._resolved[path] = found  # type: ignore[assignment]
            except no_signal(Exception, SystemExit) as error:
                self._resolved[path] = error
        return self._resolved[path]

    def _implementation(self, path: str) -> Callable[..., Any]:
        """What was resolved before the lock was taken; raises what the import raised."""
        from ..guards import implementations

        found = self._resolved[path]
        if isinstance(found, BaseException):
            raise (isinstance(found, Exception) and implementations.missing(path, found)) or found
        return found

    # ------------------------------------------------------------------------------------ one patch's turn

    @sources.parsed_once(kept=math.inf)
    def _imported(self, module_name: str, module: ModuleType) -> None:
        """Called when a watched module has been imported or reloaded. Raises only in strict mode."""
        entries = [e for e in (self._entries or {}).values() if e.requested and module_name in e.patch.modules]
        with contextlib.suppress(settings.SettingsError):  # part of each entry's reason
            self._settings()  # before the lock is taken: an error about a name imports difflib
        self._resolve_implementations(entries)
        for entry in entries:
            self._attempt(entry, module)
        self._say([_row(entry) for entry in entries], (), raising=self._is_strict())

    def _attempt(self, entry: _Entry, announced: ModuleType | None) -> None:
        """Apply a patch if it is its time; every outcome ends in a status with a reason."""
        load: Callable[[], object] | None = None
        while True:
            try:
                if load is not None:
                    load()
                with self._lock:
                    if entry.requested:
                        entry.outcome = self._outcome(entry, announced)
                    return
            except _NotReady as error:
                load = error.load
            except no_signal(Exception, SystemExit) as error:  # the promise: no exception from a framework's import
                logger().debug("patch %s failed", entry.patch.name, exc_info=True)
                # A lock that cannot be had is not waited for again: what is written is one value.
                with self._lock if not isinstance(error, _Stuck) else contextlib.nullcontext():
                    if entry.requested:
                        entry.outcome = _Outcome(Status.FAILED, f"{type(error).__name__}: {error}; nothing was changed")
                return

    def _load_what_changes(self) -> None:
        """Import what recognises code and changes it: milliseconds that a process without any of it saves."""
        from ..guards import decision, implementations  # noqa: F401 - for `_outcome` and `_put_on`
        from .ledger import Ledger

        with self._lock:
            if isinstance(self._ledger, _Nothing):
                self._ledger = Ledger(self._bites)

    def _bites(self, name: str) -> None:
        """Called within training, when the condition of a patch has held for the first time; must not raise.

        Of a patch that changes results and has no condition, when its code runs for the first time.
        """
        entry = (self._entries or {}).get(name)
        if entry is not None and speaks():
            acted(_row(entry, reached=self._ledger.reached(name)))
        self.on_change()

    def _define(self, entry: _Entry) -> KnownBug:
        """Import a patch of which only the list is known."""
        patch = entry.patch = entry.patch.load() if isinstance(entry.patch, Listed) else entry.patch
        return patch

    def _outcome(self, entry: _Entry, announced: ModuleType | None) -> _Outcome:
        patch = entry.patch
        off = self._settings().switched_off(patch.name)
        if off:
            return self._switch_off(patch.name, off)
        unasked = None if entry.named else self._settings().unasked(patch.name, patch.contested)
        if unasked:
            return self._unasked(entry, unasked)
        if announced is None:
            self._look_again(entry)
            status = entry.outcome.status
            if status is Status.APPLIED or (status is Status.OBSERVED and self._settings().observe):
                return entry.outcome
        if entry.outcome.status is Status.OBSERVED and not self._settings().observe:
            self._ledger.remove(patch.name)
        if isinstance(patch, Listed):
            absence = choices.absence(patch)  # asked first: anything else imports what parses ranges
            if absence is not None:
                return self._said(patch, absence)
        ready: dict[str, ModuleType] = {}
        for name in patch.modules:
            module = sys.modules.get(name)
            if module is not None and (module is announced or import_hooks.is_ready(module)):
                ready[name] = module
        origins = {name: _origin(module) for name, module in ready.items()}
        choice = choices.choose([choices.look(variant, origins) for variant in patch.variants])
        if isinstance(choice, Decision):
            entry.version = choice.version
            return self._said(patch, choice)
        entry.version = choice.finding.version
        if choice.finding.verdict is Verdict.OUTSIDE:
            choice = choice._replace(variants=tuple(v for v in choice.variants if ready.keys() >= {*v.modules}))
        elif not any(_has_begun(variant, ready) for variant in choice.variants):
            return self._before_import(choice, ready)
        if not choice.variants:
            return self._said(patch, choices.unaffected(choice.finding))
        if isinstance(patch, Listed):
            raise _NotReady(functools.partial(self._define, entry))
        if isinstance(self._ledger, _Nothing):
            raise _NotReady(self._load_what_changes)
        from ..guards import decision

        read = functools.partial(_source, ready)
        if not rewriting.ast_grep_is_known() and decision.has_to_search(choice, read):
            raise _NotReady(rewriting.load_ast_grep)
        found = decision.decide(choice, read)
        if found.variant is None:
            return self._said(patch, found)
        if not _has_begun(found.variant, ready):
            return self._before_import(choice._replace(variants=(found.variant,)), ready)
        return self._put_on(patch, choice.finding, found, ready, self._ledger)

    def _unasked(self, entry: _Entry, why: str) -> _Outcome:
        """What becomes of a patch that is contested upstream and was not asked for."""
        patch = entry.patch
        off = self._switch_off(patch.name, why)
        found = choices.absence(patch) if isinstance(patch, Listed) else None
        if found is None:
            found = choices.unasked(choices.choose([choices.look(variant) for variant in patch.variants]), why)
        entry.version = found.version
        return off if found.status is Status.DISABLED or off.status is Status.FAILED else self._said(patch, found)

    def _put_on(
        self, patch: KnownBug, finding: Finding, found: Decision, ready: dict[str, ModuleType], ledger: Ledger
    ) -> _Outcome:
        """Apply the changes of a variant in the modules that are imported."""
        from ..definitions.patch import put_to_use
        from ..guards import decision, implementations

        assert found.variant is not None
        here = [item for item in found.recognised if item.source.module in ready]
        try:
            observes = self._settings().observe and patch.kind != WATCH and not ledger.is_on(patch.name)
            used = () if observes else put_to_use(item.change for item in here)
            conditions: tuple[Condition, ...] = getattr(patch, "conditions", ())
            changes_results = getattr(patch, "changes_numbers", None) is not None
            targets = {item.change.target for item in here}
            told = [each.tells for each in conditions if each.tells and each.target in targets]
            missing = [path for path in (*used, *told) if path not in self._resolved]
            if missing:
                raise _NotReady(functools.partial(self._resolve_all, missing))
            if not observes:
                implementations.check_usable(here, lambda path: implementations.of_object(self._implementation(path)))
            watches = patch.kind == WATCH
            plan = ledger.plan(
                patch.name, here, ready, self._implementation, watches, observes, conditions, changes_results
            )
            compiled = ledger.commit(plan)
        except decision.REFUSALS as error:
            return self._said(patch, decision.refusal(finding, error))
        reason = found.reason
        waits = tuple((name,) for name in found.variant.modules if name not in ready)
        if waits:
            reason += f"; waiting for the import of {', '.join(name for (name,) in waits)}, to be patched too"
        if observes:
            reason += "; left as released and counted: RLHF_PATCHES_OBSERVE"
            return _Outcome(Status.OBSERVED, reason, waits=waits)
        if compiled:
            reason += f". Warning: torch.compile has already compiled {', '.join(compiled)}; call torch._dynamo.reset()"
        return _Outcome(Status.APPLIED, reason, waits=waits)

    def _said(self, patch: KnownBug | Listed, found: Decision) -> _Outcome:
        """A decision against applying, and what that leaves."""
        stays = ""
        if found.status.is_problem:
            carried = self._ledger.carrying(patch.name)
            stays = "; functions that were patched before stay patched" if carried else "; nothing was changed"
        return _Outcome(found.status, found.reason + stays, found.unreviewed)

    def _settings(self) -> settings.Settings:
        """The environment as it is now, not at import; read once in an `apply`, and once in an import."""
        assert self._entries is not None
        names = list(self._entries)
        return sources.remembered(
            ("settings", self), lambda: settings.from_environment(names, self._hint()), small=True
        )

    def _before_import(self, choice: Choice, ready: Mapping[str, ModuleType]) -> _Outcome:
        """Pending, unless it is clear already that the import will not help."""
        groups = [[name for name in variant.modules if name not in ready] for variant in choice.variants]
        for name in dict.fromkeys(name for group in groups for name in group):
            if _is_main(sources.locate(name)):
                reason = f"{name} runs as __main__, whose functions cannot be patched: import it instead"
                return _Outcome(Status.REFUSED, reason)
        waiting = " or ".join(dict.fromkeys(", ".join(group) for group in groups))
        reason = f"{choice.finding.reason}; waiting for the import of {waiting}"
        return _Outcome(Status.PENDING, reason, waits=tuple(variant.modules for variant in choice.variants))

    # ------------------------------------------------------------------------------- changing functions

    def _switch_off(self, name: str, why: str) -> _Outcome:
        """Take a patch off every function, and what has become of it then."""
        lost = self._ledger.remove(name)
        if lost:
            reason = f"{why}, but not taken off: other code has changed {', '.join(lost)} since it was patched"
            return _Outcome(Status.FAILED, reason)
        return _Outcome(Status.DISABLED, why)

    def _look_again(self, entry: _Entry) -> None:
        """Look whether an applied patch is still what runs, and whether a pending one has missed its import."""
        status = entry.outcome.status
        missed = next((group for group in entry.outcome.waits if all(map(_is_ready, group))), None)
        if missed:
            reason = f"{', '.join(missed)} was imported past the import hooks; call apply() again"
            entry.outcome = _Outcome(Status.FAILED, reason, missed=True)
            return
        if status not in _ON:
            return
        undone = self._ledger.undone(entry.patch.name)
        if not self._ledger.carrying(entry.patch.name):
            entry.outcome = _Outcome(Status.DISABLED, "reverted, by a revert() that was interrupted")
        elif undone:
            entry.outcome = _Outcome(Status.FAILED, undone)

    def _unwatch(self, entries: Iterable[_Entry]) -> None:
        """No longer wait for the modules of entries that nothing requested is for."""
        needed = {m for e in (self._entries or {}).values() if e.requested for m in e.patch.modules}
        for module in {m for e in entries for m in e.patch.modules} - needed:
            import_hooks.unwatch(module, self._imported)

    # ------------------------------------------------------------------------------------ saying so

    def _say(self, rows: Iterable[PatchReport], failures: Iterable[PluginFailure], raising: bool) -> None:
        rows, failures = tuple(rows), tuple(failures)
        self.on_change()
        announce(rows, failures)
        lines = [f"{row.name} was {row.status}: {row.reason}" for row in rows if row.is_problem]
        lines += [str(failure) for failure in failures]
        if raising and lines:
            raise PatchError("strict mode, and " + "; ".join(lines))


def _ignore() -> None:
    pass


def _row(entry: _Entry, places: tuple[str, ...] = (), reached: Reached | None = None) -> PatchReport:
    status, reason, unreviewed, *_ = entry.outcome
    return patch_report(entry.patch, entry.plugin, status, reason, entry.version, unreviewed, places, reached)


def _with_observations(row: PatchReport, patch: KnownBug | Listed) -> PatchReport:
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


def _has_begun(variant: Variant | ListedVariant, ready: Mapping[str, ModuleType]) -> bool:
    """Whether enough of a variant's modules are imported for it to be applied, or to begin with."""
    return (any if variant.independent else all)(name in ready for name in variant.modules)


def _is_ready(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and import_hooks.is_ready(module)


def _source(ready: Mapping[str, ModuleType], name: str) -> Source:
    from ..guards import known

    spec = sources.spec_of(ready[name]) if name in ready else sources.locate(name)
    if spec is None:
        raise Unreadable(f"module {name} has no __spec__, so its source file is unknown")
    return known.look_up(sources.read(spec))


def _origin(module: ModuleType) -> str | None:
    return getattr(sources.spec_of(module), "origin", None) or sources.namespace_of(module).get("__file__")


def _is_main(spec: ModuleSpec) -> bool:
    """Whether a module's file is the one that was started, as ``python file.py`` or ``python -m module``."""
    main = sources.namespace_of(sys.modules.get("__main__")).get("__file__")
    return main is not None and spec.origin is not None and sources.real_path(main) == sources.real_path(spec.origin)


engine = Engine()
"""The one of this process, behind the functions of `rlhf_patches`."""
