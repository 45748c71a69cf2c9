"""Decides on one patch at a time and applies it. Every outcome is a status with a reason."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING

from ..definitions.listed import WATCH, Listed
from ..definitions.status import Status
from ..guards import choices, locating, patterns
from ..guards.choices import Choice, Decision
from ..guards.versions import Finding, Verdict
from ..import_system import no_signal
from . import import_hooks
from .entries import Entry, NoLedger, Outcome, row
from .locks import LockTimeout
from .log import acted, begun, logger, speaks, trains
from .modules import has_begun, is_main, origin_of, source_of
from .state import State

if TYPE_CHECKING:
    from ..definitions.bug import KnownBug
    from ..definitions.patch import Condition
    from ..guards.places import Source
    from .ledger import Ledger


class NotReady(Exception):
    """A module must be imported first, which is not done under the lock."""

    def __init__(self, load: Callable[[], object]) -> None:
        super().__init__(load)
        self.load = load


class Turn(State):
    """The engine's handling of one patch at a time."""

    def _attempt(self, entry: Entry, announced: ModuleType | None) -> None:
        """Apply a patch if its modules are imported; every outcome is a status with a reason."""
        load: Callable[[], object] | None = None
        while True:
            try:
                if load is not None:
                    load()
                with self._lock:
                    if entry.requested:
                        entry.outcome = self._outcome(entry, announced)
                    return
            except NotReady as error:
                load = error.load
            except no_signal(Exception, SystemExit) as error:  # a framework's import must not raise our exceptions
                logger().debug("patch %s failed", entry.patch.name, exc_info=True)
                # Do not wait again for a lock that timed out: the outcome is one value.
                with self._lock if not isinstance(error, LockTimeout) else contextlib.nullcontext():
                    if entry.requested:
                        entry.outcome = Outcome(Status.FAILED, f"{type(error).__name__}: {error}; nothing was changed")
                return

    def _load_what_changes(self) -> None:
        """Import the modules that recognize and change code; a process without such code saves the milliseconds."""
        from ..guards import decision, implementations  # noqa: F401 - for `_outcome` and `_put_on`
        from .ledger import Ledger

        with self._lock:
            if isinstance(self._ledger, NoLedger):
                self._ledger = Ledger(self._occurs, self._begins)

    def _begins(self) -> None:
        """Handle the first call of a function with a condition; must not raise."""
        if not self._has_begun and trains():
            self._has_begun = True
            begun([row(entry) for entry in (self._entries or {}).values()])

    def _occurs(self, name: str) -> None:
        """Handle the first time that a patch's condition is true, within training; must not raise.

        For a patch that changes results and has no condition, handle the first run of its code.
        """
        entry = (self._entries or {}).get(name)
        if entry is not None and speaks():
            acted(row(entry, reached=self._ledger.reached(name)))
        self.on_change()

    def _outcome(self, entry: Entry, announced: ModuleType | None) -> Outcome:
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
            absence = choices.absence(patch)  # first: all other checks import the parser of ranges
            if absence is not None:
                return self._not_applied(patch, absence)
        ready: dict[str, ModuleType] = {}
        for name in patch.modules:
            module = sys.modules.get(name)
            if module is not None and (module is announced or import_hooks.is_ready(module)):
                ready[name] = module
        origins = {name: origin_of(module) for name, module in ready.items()}
        choice = choices.choose([choices.look(variant, origins) for variant in patch.variants])
        if isinstance(choice, Decision):
            entry.version = choice.version
            return self._not_applied(patch, choice)
        entry.version = choice.finding.version
        if choice.finding.verdict is Verdict.OUTSIDE:
            choice = choice._replace(variants=tuple(v for v in choice.variants if ready.keys() >= {*v.modules}))
        elif not any(has_begun(variant, ready) for variant in choice.variants):
            return self._before_import(choice, ready)
        if not choice.variants:
            return self._not_applied(patch, choices.unaffected(choice.finding))
        if isinstance(patch, Listed):
            raise NotReady(functools.partial(self._define, entry))
        if isinstance(self._ledger, NoLedger):
            raise NotReady(self._load_what_changes)
        from ..guards import decision

        read = functools.partial(source_of, ready)
        if not patterns.ast_grep_is_known() and decision.has_to_search(choice, read):
            raise NotReady(patterns.load_ast_grep)
        decided = decision.decide(choice, read)
        if decided.variant is None:
            if decided.status is Status.ADVICE:
                self._count(patch, choice, read, ready, self._ledger)
            return self._not_applied(patch, decided)
        if not has_begun(decided.variant, ready):
            return self._before_import(choice._replace(variants=(decided.variant,)), ready)
        return self._put_on(patch, choice.finding, decided, ready, self._ledger)

    def _count(
        self,
        patch: KnownBug,
        choice: Choice,
        read: Callable[[str], Source],
        ready: dict[str, ModuleType],
        ledger: Ledger,
    ) -> None:
        """Evaluate the condition of an advice in the calls of its functions, which are otherwise unchanged."""
        from ..guards import decision

        conditions: tuple[Condition, ...] = getattr(patch, "conditions", ())
        if not conditions:
            return
        if missing := [each.predicate for each in conditions if each.predicate not in self._resolved]:
            raise NotReady(functools.partial(self._resolve_all, missing))
        recognized, _ = decision.shapes_in(choice.variants, read)
        here = [item for items in recognized.values() for item in items if item.source.module in ready]
        try:
            plan = ledger.plan(patch.name, here, ready, self._implementation, observes=True, conditions=conditions)
            ledger.commit(plan)
        except decision.REFUSALS as error:  # other code has changed the function: the advice still holds
            logger().debug("whether %s occurs in this run is unknown: %s", patch.name, error)

    def _unasked(self, entry: Entry, why: str) -> Outcome:
        """Return the outcome of a contested patch that is not enabled by name."""
        patch = entry.patch
        off = self._switch_off(patch.name, why)
        decided = choices.absence(patch) if isinstance(patch, Listed) else None
        if decided is None:
            decided = choices.unasked(choices.choose([choices.look(variant) for variant in patch.variants]), why)
        entry.version = decided.version
        return (
            off
            if decided.status is Status.DISABLED or off.status is Status.FAILED
            else self._not_applied(patch, decided)
        )

    def _put_on(
        self, patch: KnownBug, finding: Finding, decided: Decision, ready: dict[str, ModuleType], ledger: Ledger
    ) -> Outcome:
        """Apply the changes of a variant to the imported modules."""
        from ..definitions.changes import put_to_use
        from ..guards import decision, implementations

        assert decided.variant is not None
        here = [item for item in decided.recognized if item.source.module in ready]
        try:
            observes = self._settings().observe and patch.kind != WATCH and not ledger.is_on(patch.name)
            used = () if observes else put_to_use(item.change for item in here)
            conditions: tuple[Condition, ...] = getattr(patch, "conditions", ())
            changes_results = getattr(patch, "changes_numbers", None) is not None
            targets = {item.change.target for item in here}
            predicates = [each.predicate for each in conditions if each.predicate and each.target in targets]
            missing = [path for path in (*used, *predicates) if path not in self._resolved]
            if missing:
                raise NotReady(functools.partial(self._resolve_all, missing))
            if not observes:
                implementations.check_usable(here, lambda path: implementations.of_object(self._implementation(path)))
            watches = patch.kind == WATCH
            plan = ledger.plan(
                patch.name, here, ready, self._implementation, watches, observes, conditions, changes_results
            )
            compiled = ledger.commit(plan)
        except decision.REFUSALS as error:
            return self._not_applied(patch, decision.refusal(finding, error))
        reason = decided.reason
        waits = tuple((name,) for name in decided.variant.modules if name not in ready)
        if waits:
            reason += f"; waiting for the import of {', '.join(name for (name,) in waits)}, which it also patches"
        if observes:
            reason += "; only counted, not repaired (RLHF_PATCHES_OBSERVE)"
            return Outcome(Status.OBSERVED, reason, waits=waits)
        if compiled:
            reason += f". Warning: torch.compile has already compiled {', '.join(compiled)}; call torch._dynamo.reset()"
        return Outcome(Status.APPLIED, reason, waits=waits)

    def _not_applied(self, patch: KnownBug | Listed, decided: Decision) -> Outcome:
        """Return the outcome of a decision against applying a patch."""
        stays = ""
        if decided.status.is_problem:
            carried = self._ledger.carrying(patch.name)
            stays = "; functions that were patched before stay patched" if carried else "; nothing was changed"
        return Outcome(decided.status, decided.reason + stays, decided.unreviewed)

    def _before_import(self, choice: Choice, ready: Mapping[str, ModuleType]) -> Outcome:
        """Return a pending outcome, unless the import cannot help."""
        groups = [[name for name in variant.modules if name not in ready] for variant in choice.variants]
        for name in dict.fromkeys(name for group in groups for name in group):
            if is_main(locating.locate(name)):
                reason = f"{name} runs as __main__, which cannot be patched: import it instead"
                return Outcome(Status.REFUSED, reason)
        waiting = " or ".join(dict.fromkeys(", ".join(group) for group in groups))
        reason = f"{choice.finding.reason}; waiting for the import of {waiting}"
        return Outcome(Status.PENDING, reason, waits=tuple(variant.modules for variant in choice.variants))
