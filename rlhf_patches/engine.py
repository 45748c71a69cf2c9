"""Applying and reverting: which patch, when, all or nothing, and what is said about it.

Everything that changes functions happens under one lock. Nothing is imported under it: an import hook runs
while Python holds import locks, and a thread that held ours while waiting for one of those would deadlock.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from importlib.machinery import ModuleSpec
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from . import functions, imports, plugins, recognition, rewriting, settings, sources, trampolines, versions
from .log import announce, logger
from .plugins import PluginFailure, Registered
from .recognition import Recognised
from .reporting import PatchError, PatchReport, Report, Status, patch_report
from .rewriting import Edit, NoEffect, Unrecognised
from .sources import NotFound, Source, Unreadable
from .versions import Verdict
from .vocabulary import Patch, Replace, Rewrite, Wrap

if TYPE_CHECKING:
    from .agreement import Effect

Names = Iterable[str] | str | None


class _NotResolved(Exception):
    """An implementation that is needed has not been imported yet."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class Conflict(Exception):
    """Another patch holds the function; the message names it."""


@dataclass
class _Patched:
    """A function object that carries at least one patch, and what it takes to give it any set of them."""

    function: FunctionType
    located: functions.Located
    target: str
    source: Source
    node: sources.FunctionNode
    original: CodeType
    current: CodeType
    rewrites: dict[str, list[Edit]] = field(default_factory=dict)
    trampoline_of: str | None = None

    @property
    def holders(self) -> list[str]:
        """The patches on this function."""
        return list(self.rewrites) + ([self.trampoline_of] if self.trampoline_of else [])


@dataclass(frozen=True)
class _Swap:
    """One step of applying a patch: a function is to get ``new`` in place of ``old``."""

    patched: _Patched
    old: CodeType
    new: CodeType
    changes: list[Recognised]


class _Outcome(NamedTuple):
    """What has become of a patch. One value, so that a status never stands beside the reason of another."""

    status: Status
    reason: str
    unread: bool = False


_FRESH = _Outcome(Status.DISABLED, "apply() has not been called")


@dataclass
class _Entry:
    """A registered patch and what has become of it."""

    patch: Patch
    plugin: str
    requested: bool = False
    outcome: _Outcome = _FRESH
    version: str | None = None


@dataclass(frozen=True)
class Asked:
    """``chosen`` is None as long as `apply` has not been called; ``hint`` ends an error about an unknown name."""

    names: tuple[str, ...]
    chosen: tuple[str, ...] | None
    strict: bool | None
    hint: str


class Engine:
    """The state of one process. Use the functions of `rlhf_patches`; there is one engine behind them."""

    def __init__(self, load: Callable[[], tuple[list[Registered], list[PluginFailure]]] = plugins.load) -> None:
        self._load = load
        self.on_change: Callable[[], None] = _nobody_listens
        """Called after patches may have changed their states, never under the lock; must not raise."""
        self._lock = threading.RLock()
        self._loading = threading.RLock()
        self._is_loading = False
        self._entries: dict[str, _Entry] | None = None
        self._failures: list[PluginFailure] = []
        self._patched: dict[FunctionType, _Patched] = {}
        self._resolved: dict[str, Callable[..., Any] | Exception | SystemExit] = {}
        self._strict: bool | None = None
        self._called = False
        # A child must not inherit a lock that another thread of the parent held while it forked.
        os.register_at_fork(after_in_child=self._renew_locks)

    # ------------------------------------------------------------------------------------- public calls

    @sources.parsed_once()
    def apply(self, only: Names = None, exclude: Names = None, strict: bool | None = None) -> Report:
        """See `rlhf_patches.apply`."""
        entries = self._registered()
        names = list(entries)
        selected = set(names if only is None else settings.expand(only, names, "only", self._hint()))
        excluded = set(settings.expand(exclude, names, "exclude", self._hint()))
        environment = settings.read(names, self._hint())  # a wrong variable is an error before anything changes
        settings.log_level()
        self._resolve_implementations([entries[name] for name in selected - excluded])
        with self._lock:
            self._strict, self._called = strict, True
            for name, entry in entries.items():
                if name in selected and name not in excluded:
                    entry.requested = True
                elif not entry.requested:
                    why = "excluded by apply(exclude=...)" if name in excluded else "not chosen by apply(only=...)"
                    entry.outcome = self._switch_off(name, why)
        for module in dict.fromkeys(m for e in entries.values() if e.requested for m in e.patch.modules):
            imports.watch(module, self._imported)
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
                if entry.requested or self._carrying(name):  # an earlier call may not have got it off
                    entry.requested = False
                    entry.outcome = self._switch_off(name, "reverted by revert()")
            still_needed = {m for e in entries.values() if e.requested for m in e.patch.modules}
            for module in {m for name in chosen for m in entries[name].patch.modules} - still_needed:
                imports.unwatch(module, self._imported)
        self.on_change()
        return self.report()

    def report(self) -> Report:
        """See `rlhf_patches.report`."""
        entries = self._registered()
        with self._lock:
            for entry in entries.values():
                self._verify(entry)
            rows, failures = [(_row(entry), entry.patch) for entry in entries.values()], tuple(self._failures)
        # Not under the lock: it is somebody else's code.
        return Report(tuple(_with_observations(row, patch) for row, patch in rows), failures)

    # ---------------------------------------------------------------------------------- for other processes

    def asked(self) -> Asked:
        """What the callers of `apply` and `revert` have asked for so far, whatever became of it."""
        entries = self._registered()
        with self._lock:
            chosen = tuple(name for name, entry in entries.items() if entry.requested) if self._called else None
            return Asked(tuple(entries), chosen, self._strict, self._hint())

    def effects(self) -> dict[str, Effect]:
        """What every patch does in this process, or will do once its modules are imported, to be compared with others.

        Nothing is imported or changed.
        """
        from . import agreement

        entries = self._registered()
        with self._lock:
            for entry in entries.values():
                self._verify(entry)
            found = [
                (entry.patch, _row(entry), {p.source.module: p.source.text for p in self._carrying(entry.patch.name)})
                for entry in entries.values()
            ]
        return {patch.name: agreement.effect(patch, row, texts) for patch, row, texts in found}

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
                self._entries = {item.patch.name: _Entry(item.patch, item.plugin) for item in registered}
            return self._entries

    def _hint(self) -> str:
        return plugins.hint(self._failures)

    def _renew_locks(self) -> None:
        self._lock, self._loading, self._is_loading = threading.RLock(), threading.RLock(), False

    def _resolve_implementations(self, entries: Iterable[_Entry]) -> None:
        """Import the implementations of patches whose targets are there already, before the lock is taken."""
        for entry in entries:
            if all(module in sys.modules for module in entry.patch.modules):
                for path in entry.patch.implementations:
                    self._resolve(path)

    def _resolve(self, path: str) -> Callable[..., Any] | Exception | SystemExit:
        if path not in self._resolved or isinstance(self._resolved[path], (Exception, SystemExit)):
            module, _, qualname = path.partition(":")
            try:
                found = functools.reduce(getattr, qualname.split("."), importlib.import_module(module))
                self._resolved[path] = found  # type: ignore[assignment]
            except (Exception, SystemExit) as error:
                self._resolved[path] = error
        return self._resolved[path]

    def _implementation(self, path: str) -> Callable[..., Any]:
        """What was resolved before the lock was taken; raises what the import raised."""
        if path not in self._resolved:
            raise _NotResolved(path)
        found = self._resolved[path]
        if isinstance(found, (Exception, SystemExit)):
            raise found
        return found

    # ------------------------------------------------------------------------------------ one patch's turn

    @sources.parsed_once()
    def _imported(self, module_name: str, module: ModuleType) -> None:
        """Called when a watched module has been imported or reloaded. Raises only in strict mode."""
        entries = [e for e in (self._entries or {}).values() if e.requested and module_name in e.patch.modules]
        self._resolve_implementations(entries)
        for entry in entries:
            self._attempt(entry, module)
        try:
            strict = self._strict if self._strict is not None else settings.truth("STRICT")
        except settings.SettingsError:
            strict = False  # already part of each entry's reason
        self._say([_row(entry) for entry in entries], (), raising=strict)

    def _attempt(self, entry: _Entry, announced: ModuleType | None) -> None:
        """Apply a patch if it is its time; every outcome ends in a status with a reason."""
        while True:
            with self._lock:
                if not entry.requested:
                    return
                try:
                    entry.outcome = self._outcome(entry, announced)
                    return
                except _NotResolved as error:  # another thread has imported the target since; not under the lock
                    path = error.path
                except (Exception, SystemExit) as error:  # the promise: never an exception from somebody's import
                    logger.debug("patch %s failed", entry.patch.name, exc_info=True)
                    entry.outcome = _Outcome(Status.FAILED, f"{type(error).__name__}: {error}; nothing was changed")
                    return
            self._resolve(path)

    def _outcome(self, entry: _Entry, announced: ModuleType | None) -> _Outcome:
        patch = entry.patch
        off = self._switched_off(patch.name)
        if off:
            return self._switch_off(patch.name, off)
        if announced is None:
            self._verify(entry)
            if entry.outcome.status is Status.APPLIED:
                return entry.outcome
        modules: dict[str, ModuleType] = {}
        for name in patch.modules:
            module = sys.modules.get(name)
            if module is not None and (module is announced or imports.is_ready(module)):
                modules[name] = module
        missing = [name for name in patch.modules if name not in modules]
        if missing:
            return self._before_import(entry, missing)
        finding = versions.worst([versions.check(patch.guard, _origin(module)) for module in modules.values()])
        entry.version = finding.version
        try:
            texts = {name: _source(name, module) for name, module in modules.items()}
            if finding.verdict is Verdict.OUTSIDE:
                return _Outcome(Status.UNAFFECTED, *recognition.outside(patch, finding, texts))
            recognised = recognition.recognise_all(patch, texts)
            applied = self._put_on(patch, recognised, modules)
        except (NoEffect, Unrecognised, Unreadable, Conflict, trampolines.Unsupported) as error:
            status, reason = recognition.refusal(finding, error)
            stays = f"; {self._what_stays(patch.name)}" if status is Status.REFUSED else ""
            return _Outcome(status, reason + stays)
        return _Outcome(Status.APPLIED, f"{finding.reason}{applied}")

    def _what_stays(self, name: str) -> str:
        return "functions from before a reload stay patched" if self._carrying(name) else "nothing was changed"

    def _switched_off(self, name: str) -> str | None:
        """Why the user has switched a patch off with an environment variable, read now, not at import."""
        assert self._entries is not None
        return settings.read(list(self._entries), self._hint()).switched_off(name)

    def _before_import(self, entry: _Entry, missing: list[str]) -> _Outcome:
        """Pending, or already known to be absent or unaffected; the hooks stay armed, since ``sys.path`` may change."""
        waiting = f"waiting for the import of {', '.join(missing)}"
        try:
            specs = {name: sources.locate(name) for name in missing}
        except NotFound as error:
            entry.version, reason = versions.why_absent(entry.patch.guard, error)
            return _Outcome(Status.ABSENT, reason)
        finding = versions.worst([versions.check(entry.patch.guard, spec.origin) for spec in specs.values()])
        entry.version = finding.version
        if finding.verdict is Verdict.OUTSIDE:
            return _Outcome(Status.UNAFFECTED, finding.reason)
        main = next((name for name, spec in specs.items() if _is_main(spec)), None)
        if main is not None:
            reason = f"{main} runs as __main__, whose functions cannot be patched: import it instead"
            return _Outcome(Status.REFUSED, reason)
        if any(isinstance(change, Rewrite) for change in entry.patch.changes):
            rewriting.check_ast_grep()  # what will fail at the import is said before it
        return _Outcome(Status.PENDING, f"{finding.reason}; {waiting}")

    # ------------------------------------------------------------------------------- changing functions

    def _put_on(self, patch: Patch, recognised: list[Recognised], modules: dict[str, ModuleType]) -> str:
        """Compute every new code object first, then swap them all; on an exception swap back.

        Returns what is worth adding to the reason. Raises what a refusal is made of.
        """
        plan: list[_Swap] = []
        idle: NoEffect | None = None
        originals = {function: patched.original for function, patched in self._patched.items()}
        for target, changes in recognition.by_function(recognised).items():
            first = changes[0]
            located = functions.locate(modules[target.partition(":")[0]], first.qualname)
            function = functions.find(located, first.original_code(), originals, target)
            patched = self._patched.get(function) or _Patched(
                function, located, target, first.source, first.node, function.__code__, function.__code__
            )
            if patch.name in patched.holders:  # a reload: this function object carries it from before
                continue
            if any(swap.patched.function is function for swap in plan):
                raise Conflict(f"{target} is a function that another change of {patch.name} has as its target")
            if function.__code__ is not patched.current or first.source.text != patched.source.text:
                raise Conflict(f"{target}, patched by {', '.join(patched.holders)}, was changed by somebody else since")
            try:
                new = self._compose(patch, patched, changes)
            except NoEffect as error:
                idle = error
                continue
            functions.check_swap(function, new)
            plan.append(_Swap(patched, function.__code__, new, changes))
        if idle is not None and not plan and not self._carrying(patch.name):
            raise idle
        cached = [swap.patched.target for swap in plan if functions.in_dynamo_cache(swap.patched.function)]
        with self._all_or_nothing([swap.patched for swap in plan]):
            for swap in plan:
                if isinstance(swap.changes[0].change, Rewrite):
                    swap.patched.rewrites[patch.name] = [edit for item in swap.changes for edit in item.edits]
                else:
                    swap.patched.trampoline_of = patch.name
                self._patched[swap.patched.function] = swap.patched
                swap.patched.current = swap.patched.function.__code__ = swap.new
        if cached:
            return f". Warning: torch.compile has already compiled {', '.join(cached)}; call torch._dynamo.reset()"
        return ""

    @contextlib.contextmanager
    def _all_or_nothing(self, changed: list[_Patched]) -> Iterator[None]:
        """Undo what was done to these functions, and noted of them, if anything is raised within: Ctrl-C too."""
        before = [(patched, patched.current, dict(patched.rewrites), patched.trampoline_of) for patched in changed]
        try:
            yield
        except BaseException:
            for patched, code, rewrites, trampoline_of in before:
                patched.current, patched.rewrites, patched.trampoline_of = code, rewrites, trampoline_of
                if patched.function.__code__ is not code:
                    patched.function.__code__ = code
                if not patched.holders:
                    self._patched.pop(patched.function, None)
            raise

    def _compose(self, patch: Patch, patched: _Patched, changes: list[Recognised]) -> CodeType:
        """The function's code with this patch on top of those that it carries."""
        target = changes[0].change.target
        rewrites = [item for item in changes if isinstance(item.change, Rewrite)]
        if len(rewrites) != len(changes) and len(changes) > 1:
            raise Conflict(f"{patch.name} both rewrites and replaces or wraps {target}")
        if rewrites:
            if patched.trampoline_of:
                raise Conflict(f"{target} is replaced or wrapped by {patched.trampoline_of}")
            edits = recognition.combined([item.edits for item in rewrites], target)
            for other, present in patched.rewrites.items():
                if any(edit.overlaps(theirs) for edit in edits for theirs in present):
                    raise Conflict(f"{target}: {other} rewrites the same code")
            present = [edit for theirs in patched.rewrites.values() for edit in theirs]
            for path in patch.implementations:
                # A helper that cannot be imported must show now, not in the middle of training.
                self._implementation(path)
            return rewriting.rewrite_code(patched.source, patched.node, present + edits)
        if patched.holders:
            raise Conflict(f"{target} is patched by {', '.join(patched.holders)} already")
        change = changes[0].change
        assert isinstance(change, (Replace, Wrap))
        return trampolines.build(
            patched.function,
            self._implementation(change.implementation),
            wraps=isinstance(change, Wrap),
            binding=patched.located.binding,
            by=patch.name,
        )

    def _switch_off(self, name: str, why: str) -> _Outcome:
        """Take a patch off every function, and what has become of it then."""
        lost = self._remove(name)
        if lost:
            reason = f"{why}, but not taken off: somebody else has changed {', '.join(lost)} since it was patched"
            return _Outcome(Status.FAILED, reason)
        return _Outcome(Status.DISABLED, why)

    def _remove(self, name: str) -> list[str]:
        """Take a patch off every function that carries it; returns the targets that somebody else has changed."""
        carrying = self._carrying(name)
        lost = [patched.target for patched in carrying if patched.function.__code__ is not patched.current]
        ours = [patched for patched in carrying if patched.function.__code__ is patched.current]
        codes = []
        for patched in ours:
            edits = [edit for other, theirs in patched.rewrites.items() if other != name for edit in theirs]
            codes.append(rewriting.rewrite_code(patched.source, patched.node, edits) if edits else patched.original)
        with self._all_or_nothing(ours):
            for patched, code in zip(ours, codes, strict=True):
                patched.rewrites.pop(name, None)
                if patched.trampoline_of == name:
                    patched.trampoline_of = None
                patched.current = patched.function.__code__ = code
        for patched in ours:
            if not patched.holders:
                self._patched.pop(patched.function, None)
        return lost

    def _carrying(self, name: str) -> list[_Patched]:
        return [patched for patched in self._patched.values() if name in patched.holders]

    def _verify(self, entry: _Entry) -> None:
        """Look whether an applied patch is still what runs, and whether a pending one has missed its import."""
        loaded = [sys.modules.get(module) for module in entry.patch.modules]
        status = entry.outcome.status
        if status is Status.PENDING and all(m is not None and imports.is_ready(m) for m in loaded):
            reason = f"{', '.join(entry.patch.modules)} was imported past the import hooks; call apply() again"
            entry.outcome = _Outcome(Status.FAILED, reason)
        if status is not Status.APPLIED:
            return
        mine = self._carrying(entry.patch.name)
        if not mine:
            entry.outcome = _Outcome(Status.DISABLED, "reverted, by a revert() that was interrupted")
        for target in dict.fromkeys(patched.target for patched in mine):
            module_name, _, qualname = target.partition(":")
            module = sys.modules.get(module_name)
            problem = None
            if module is None:
                problem = f"{module_name} is no longer imported"
            else:
                try:
                    raw = functions.locate(module, qualname).raw
                except Unrecognised as error:
                    problem = str(error)
                else:
                    here = [p for p in mine if p.target == target and functions.reaches(raw, p.function)]
                    if not here:
                        problem = f"{target} was replaced by something else after it was patched"
                    elif any(patched.function.__code__ is not patched.current for patched in here):
                        problem = f"the code of {target} was changed by somebody else after it was patched"
            if problem:
                entry.outcome = _Outcome(Status.FAILED, problem)
                return

    # ------------------------------------------------------------------------------------ saying so

    def _say(self, rows: Iterable[PatchReport], failures: Iterable[PluginFailure], raising: bool) -> None:
        rows, failures = tuple(rows), tuple(failures)
        self.on_change()
        announce(rows, failures)
        lines = [f"{row.name} was {row.status}: {row.reason}" for row in rows if row.status.is_problem]
        lines += [str(failure) for failure in failures]
        if raising and lines:
            raise PatchError("strict mode, and " + "; ".join(lines))


def _nobody_listens() -> None:
    pass


def _row(entry: _Entry) -> PatchReport:
    outcome = entry.outcome
    return patch_report(entry.patch, entry.plugin, outcome.status, outcome.reason, entry.version, outcome.unread)


def _with_observations(row: PatchReport, patch: Patch) -> PatchReport:
    """The row of an applied patch, with what the patch says it has done so far."""
    module_name, _, function = (patch.observations or "").partition(":")
    module = sys.modules.get(module_name)
    if row.status is not Status.APPLIED or module is None:
        return row
    try:
        found = dict(getattr(module, function)())
    except Exception as error:  # a report must not fail for this
        return replace(row, reason=f"{row.reason}; {patch.observations} failed: {type(error).__name__}: {error}")
    if not found:
        return row
    said = ", ".join(f"{what}: {value}" for what, value in found.items())
    return replace(row, reason=f"{row.reason}; observed: {said}", observations=found)


def _source(name: str, module: ModuleType) -> Source:
    spec = sources.spec_of(module)
    if spec is None:
        raise Unreadable(f"module {name} has no __spec__, so its source file is unknown")
    return sources.read(spec)


def _origin(module: ModuleType) -> str | None:
    return getattr(sources.spec_of(module), "origin", None) or sources.namespace_of(module).get("__file__")


def _is_main(spec: ModuleSpec) -> bool:
    """Whether a module's file is the one that was started, as ``python file.py`` or ``python -m module``."""
    main = sources.namespace_of(sys.modules.get("__main__")).get("__file__")
    return main is not None and spec.origin is not None and os.path.realpath(main) == os.path.realpath(spec.origin)
