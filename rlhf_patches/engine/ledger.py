"""The ledger: records which function carries which patches, and makes every change, all or nothing.

It handles code, not statuses: `Engine` decides when, holds the lock, and reports the outcome. Nothing is imported.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any

from ..definitions.changes import Replace, Rewrite, Wrap
from ..definitions.patch import Condition
from ..definitions.reached import Reached
from ..guards import decision, rewriting, shapes
from ..guards.decision import Conflict
from ..guards.edits import Edit, NoEffect, Unrecognized
from ..guards.shapes import Recognized
from ..import_system import no_signal
from . import functions, reached, trampolines, uses
from .log import logger
from .patched import Patched, Plan, Swap
from .reached import Entries, Probe

Implementation = Callable[[str], Callable[..., Any]]
"""Maps ``module:qualified.name`` to the object, which is already imported; raises the exception of its import."""


class Ledger:
    """The patches of each function. All calls except `in_force` and `matched` are made under the `Engine`'s lock."""

    def __init__(
        self, on_first: Callable[[str], None] = lambda patch: None, on_entry: Callable[[], None] = lambda: None
    ) -> None:
        self._on_first, self._on_entry = on_first, on_entry
        self._patched: dict[FunctionType, Patched] = {}
        self._complete: dict[str, list[Patched]] = {}
        self._matched: dict[str, dict[str, str]] = {}

    def in_force(self, name: str) -> bool:
        """Whether a patch runs now at each of its targets. Takes no lock and imports nothing."""
        complete = self._complete.get(name)
        return complete is not None and all(patched.runs(name) for patched in complete)

    def matched(self, name: str) -> dict[str, str]:
        """Map each target of a patch to the fingerprint that matched when the patch was last applied to it."""
        return self._matched.get(name, {})

    def carrying(self, name: str) -> list[Patched]:
        """Return the functions that carry a patch or that it observes. Takes no lock."""
        return [patched for patched in [*self._patched.values()] if name in patched.carried]

    def is_on(self, name: str) -> bool:
        """Whether any function runs with a patch; observed functions do not count."""
        return any(name in patched.holders for patched in self._patched.values())

    def reached(self, name: str) -> Reached | None:
        """Return the call counts of a patch's functions; None if none is counted."""
        by_target: dict[str, list[Reached]] = {}
        for patched in self.carrying(name):
            if name in patched.counted:
                by_target.setdefault(patched.target, []).append(patched.entries.seen(name))
        return reached.together(by_target)

    def start_anew(self) -> None:
        """Reset the counts in a forked child."""
        for patched in self._patched.values():
            patched.entries.start_anew()

    def plan(
        self,
        name: str,
        recognized: list[Recognized],
        modules: dict[str, ModuleType],
        implementation: Implementation,
        watches: bool = False,
        observes: bool = False,
        conditions: Sequence[Condition] = (),
        notes_first: bool = False,
    ) -> Plan:
        """Build every new code object that a patch requires. No function is changed.

        Args:
            name: the patch.
            recognized: its changes, as located in the text of their modules.
            modules: the modules of the changes, by name.
            implementation: returns the implementation of a `Replace` or `Wrap`.
            watches: whether it is a `Watch`, which wraps any patch.
            observes: whether the functions are only counted, and not changed.
            conditions: the patch's conditions.
            notes_first: whether to call back on the first call of its code, if it has no condition.

        Raises:
            Conflict: another patch has changed a function, or other code has changed it after it was patched.
            NoEffect: under ``python -O`` there is nothing to repair.
            Unrecognized: a live function differs from the text.
            decision.CannotApply: no trampoline can replace a function.
        """
        plan = Plan(name, watches, observes, [], [])
        idle: NoEffect | None = None
        originals = {function: patched.original for function, patched in self._patched.items()}
        groups = shapes.by_function(recognized)
        for target, changes in groups.items():
            first = changes[0]
            located = functions.attribute(modules[target.partition(":")[0]], first.qualname)
            try:
                function = functions.find(located, first.original_code(), originals, target)
            except Unrecognized:  # try the whole module: a slice is verified for the Python versions of its time
                changes = [item.in_the_whole() for item in changes]
                first = changes[0]
                function = functions.find(located, first.original_code(), originals, target)
            patched = self._patched.get(function) or Patched(
                function=function,
                located=located,
                target=target,
                source=first.source,
                place=first.place,
                original=function.__code__,
                current=function.__code__,
                inner=function.__code__,
                entries=Entries(function, first.qualname, self._on_first, self._on_entry),
            )
            if name in patched.carried:  # a reload: this function object already carries it
                plan.functions.append(patched)
                continue
            if any(swap.patched.function is function for swap in plan.swaps):
                raise Conflict(f"{target} is also the target of another change of {name}")
            if function.__code__ is not patched.current or first.source.text != patched.source.text:
                raise Conflict(f"other code has changed {target} after {', '.join(patched.carried)} patched it")
            inner, watch, counted = patched.inner, patched.watch, patched.counted
            try:
                if watches:
                    watch = _watch(patched, changes, implementation)
                else:
                    probe = _probe(name, function, target, conditions, implementation)
                    if notes_first and not conditions:
                        probe = Probe(name, None, (), "")
                    counted = {**counted, name: probe}
                    if observes and not patched.trampoline_of:  # a trampoline also counts, and must stay
                        inner = _coded(patched, _edits(patched), (), counted)
                    elif not observes:
                        inner = _compose(
                            name, patched, changes, _rewritten_beside(target, groups), implementation, counted
                        )
            except NoEffect as error:
                idle = error
                continue
            new = _around(patched, inner, watch, name if watches else patched.watched_by)
            functions.check_swap(function, new)
            plan.swaps.append(Swap(patched, inner, watch, new, changes, counted))
            plan.functions.append(patched)
        if idle is not None and not plan.swaps and not self.carrying(name):
            raise idle
        return plan

    def commit(self, plan: Plan) -> list[str]:
        """Swap the code of every function of a plan, or of none if an exception is raised.

        Returns the targets that torch.compile has already compiled.
        """
        name = plan.name
        cached = [swap.patched.target for swap in plan.swaps if functions.in_dynamo_cache(swap.patched.function)]
        with self._all_or_nothing(name, [swap.patched for swap in plan.swaps]):
            # Before the first swap: afterwards another thread may run an implementation that calls `matched`.
            fingerprints = {change.change.target: change.fingerprint for swap in plan.swaps for change in swap.changes}
            now = {target: fingerprint for target, fingerprint in fingerprints.items() if fingerprint is not None}
            self._matched[name] = {**self.matched(name), **now}
            for swap in plan.swaps:
                if plan.watches:
                    swap.patched.watched_by = name
                elif not plan.observes and isinstance(swap.changes[0].change, Rewrite):
                    swap.patched.rewrites[name] = [edit for item in swap.changes for edit in item.edits]
                elif not plan.observes:
                    swap.patched.trampoline_of = name
                swap.patched.inner, swap.patched.watch, swap.patched.counted = swap.inner, swap.watch, swap.counted
                self._patched[swap.patched.function] = swap.patched
                _give(swap.patched, swap.new)
            self._complete[name] = plan.functions
        return cached

    def remove(self, name: str) -> list[str]:
        """Remove a patch from every function that carries it; return the targets that other code has changed."""
        carrying = self.carrying(name)
        lost = [patched.target for patched in carrying if patched.function.__code__ is not patched.current]
        ours = [patched for patched in carrying if patched.function.__code__ is patched.current]
        without = [_without(name, patched) for patched in ours]
        with self._all_or_nothing(name, ours):
            for patched, (inner, watch, code) in zip(ours, without, strict=True):
                patched.rewrites.pop(name, None)
                if patched.trampoline_of == name:
                    patched.trampoline_of = None
                if patched.watched_by == name:
                    patched.watched_by = None
                patched.counted = patched.counted_without(name)
                patched.inner, patched.watch = inner, watch
                _give(patched, code)
        for patched in ours:
            if not patched.carried:
                self._patched.pop(patched.function, None)
        return lost

    def undone(self, name: str) -> str | None:
        """Return why a patch no longer runs at its targets; None if it does."""
        carrying = self.carrying(name)
        for target in dict.fromkeys(patched.target for patched in carrying):
            module_name, _, qualname = target.partition(":")
            module = sys.modules.get(module_name)
            if module is None:
                return f"{module_name} is no longer imported"
            try:
                raw = functions.attribute(module, qualname).raw
            except Unrecognized as error:
                return str(error)
            here = [p for p in carrying if p.target == target and functions.reaches(raw, p.function)]
            if not here:
                return f"{target} was replaced after it was patched"
            if any(patched.function.__code__ is not patched.current for patched in here):
                return f"other code has changed the code of {target} after it was patched"
        return None

    @contextlib.contextmanager
    def _all_or_nothing(self, name: str, changed: list[Patched]) -> Iterator[None]:
        """Undo the changes of these functions and of their records if an exception is raised, including Ctrl-C.

        Within the context the patch is not in force, since only some functions may carry it.
        """
        before = [(patched, _state(patched)) for patched in changed]
        matched, complete = self._matched.get(name, {}), self._complete.get(name)
        try:
            self._complete.pop(name, None)
            yield
        except BaseException:
            for patched, state in before:
                vars(patched).update(state)
                if patched.function.__code__ is not patched.current:
                    patched.function.__code__ = patched.current
                if not patched.carried:
                    self._patched.pop(patched.function, None)
            self._matched[name] = matched
            if complete is not None:
                self._complete[name] = complete
            else:
                self._complete.pop(name, None)
            raise


def _state(patched: Patched) -> dict[str, Any]:
    """Return the attributes that may change."""
    names = ("current", "inner", "watch", "watched_by", "trampoline_of", "counted")
    return {**{name: getattr(patched, name) for name in names}, "rewrites": dict(patched.rewrites)}


def _without(name: str, patched: Patched) -> tuple[CodeType, Callable[..., Any] | None, CodeType]:
    """Return a function's code without a patch, its watch, and the code with the watch."""
    inner, watch = patched.inner, patched.watch
    if patched.watched_by == name:
        watch = None
    elif patched.trampoline_of in (None, name):
        edits = [edit for other, theirs in patched.rewrites.items() if other != name for edit in theirs]
        inner = _coded(patched, edits, (), patched.counted_without(name))
    return inner, watch, _around(patched, inner, watch, patched.watched_by)


def _watch(patched: Patched, changes: list[Recognized], implementation: Implementation) -> Callable[..., Any]:
    """Return the implementation of a watch."""
    (change,) = (each.change for each in changes)
    assert isinstance(change, Wrap)
    decision.check_watch(patched.target, patched)
    return implementation(change.implementation)


def _around(patched: Patched, inner: CodeType, watch: Callable[..., Any] | None, by: str | None) -> CodeType:
    """Return the code of a function, wrapped by its watch if it has one."""
    if watch is None:
        return inner
    binding = patched.located.binding
    return trampolines.build(patched.function, inner, watch, wraps=True, binding=binding, by=by or "")


def _give(patched: Patched, code: CodeType) -> None:
    patched.given.append((code, patched.holders))
    patched.current = patched.function.__code__ = code


def _rewritten_beside(target: str, groups: dict[str, list[Recognized]]) -> list[rewriting.Edited]:
    """Return the other functions of the same module that a patch rewrites."""
    source = groups[target][0].source
    return [
        (changes[0].place, shapes.combined([item.edits for item in changes], other))
        for other, changes in groups.items()
        if other != target and changes[0].source is source and any(item.edits for item in changes)
    ]


def _edits(patched: Patched) -> list[Edit]:
    """Return the edits of all rewrites of a function."""
    return [edit for theirs in patched.rewrites.values() for edit in theirs]


def _coded(
    patched: Patched, edits: list[Edit], beside: Sequence[rewriting.Edited], counted: dict[str, Probe | None]
) -> CodeType:
    """Return the function's code with edits, and with call counts if a patch needs them."""
    source, place = patched.source, patched.place
    code = rewriting.rewrite_code(source, place, edits, beside) if edits else patched.original
    named = uses.by_name(patched.function, edits)
    if not counted:
        return code if named == edits else rewriting.entered_code(source, place, named, "", patched.original)
    first = patched.entries.statement(filter(None, counted.values()))
    try:
        return rewriting.entered_code(source, place, named, first, patched.original)
    except Unrecognized as error:  # the repair matters more than the count
        logger().debug("%s is not counted: %s", patched.target, error)
        return code


def _probe(
    name: str, function: FunctionType, target: str, conditions: Sequence[Condition], implementation: Implementation
) -> Probe | None:
    """Return a patch's condition in a function, if it has one that applies to this function."""
    for condition in conditions:
        if condition.target != target:
            continue
        if not condition.predicate:
            return Probe(name, _left_to_the_repair, (), condition.measure)
        try:
            predicate = implementation(condition.predicate)
            code = predicate.__code__
            arguments = code.co_varnames[: code.co_argcount]
            missing = {*arguments} - {*functions.parameters(function.__code__)}
            if not missing:
                return Probe(name, predicate, arguments, condition.measure)
            names = ", ".join(sorted(missing))
            logger().debug("the condition of %s does not apply to %s, which has no parameter %s", name, target, names)
        except no_signal(Exception, SystemExit) as error:  # the repair matters more than the observation
            logger().debug("%s of %s cannot be used: %s", condition.predicate, name, error)
    return None


def _left_to_the_repair() -> None:
    """Return None for any call: the repair decides."""


def _compose(
    name: str,
    patched: Patched,
    changes: list[Recognized],
    beside: list[rewriting.Edited],
    implementation: Implementation,
    counted: dict[str, Probe | None],
) -> CodeType:
    """Return the function's code with this patch in addition to those that it carries."""
    edits = decision.edits_beside(name, changes, patched)
    if edits is not None:
        return _coded(patched, _edits(patched) + edits, beside, counted)
    change = changes[0].change
    assert isinstance(change, (Replace, Wrap))
    return trampolines.build(
        patched.function,
        patched.original,
        implementation(change.implementation),
        wraps=isinstance(change, Wrap),
        binding=patched.located.binding,
        by=name,
        first=patched.entries.statement(filter(None, counted.values())),
    )
