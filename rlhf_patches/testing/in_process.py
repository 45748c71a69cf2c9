"""Switch one patch on and off in this process; other patches do not change. pytest is not required."""

from __future__ import annotations

import contextlib
import importlib
import operator
import os
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

from ..definitions.bug import KnownBug
from ..definitions.patch import Patch
from ..definitions.status import PatchReport, Status
from ..definitions.variant import Variant
from ..engine import functions
from ..engine.engine import engine
from ..guards import choices, decision, locating
from ..guards.choices import Decision
from ..guards.edits import Unrecognized
from ..settings import SettingsError


@contextlib.contextmanager
def applied(patch: Patch | str) -> Iterator[PatchReport]:
    """Apply a patch within the context, and restore every function's original code at the end. Imports its modules.

    For an independent variant one importable module suffices. A patch that was applied before is applied again
    afterwards.

    Args:
        patch: a patch, registered or not, or the name of a registered patch.

    Yields:
        the patch's row in the report.

    Raises:
        AssertionError: the patch is not applied, or not reverted at the end; the message has the reason.
        TypeError: it is not a patch; an advice is never applied.
        SettingsError: no patch has this name, or another patch is registered under it.
        ImportError: the patch's modules cannot be imported.
    """
    patch = _patch(patch)
    choice = choices.choose([choices.look(variant) for variant in patch.variants])
    decided = choice if isinstance(choice, Decision) else decision.decide(choice, locating.read_module)
    if decided.variant is None:  # decided without an import, which may take long
        raise AssertionError(f"{patch} is {decided.status} instead of applied: {decided.reason}")
    modules = _imported(decided.variant)
    targets = [change.target for change in decided.variant.changes if change.target.partition(":")[0] in modules]
    with engine.set_apart(patch):
        before = codes_of(targets)
        row = engine.switch(patch.name, on=True)
        if row.status is not Status.APPLIED:
            raise AssertionError(f"{patch} is {row.status} instead of applied: {row.reason}")
        try:
            yield row
        finally:
            row = engine.switch(patch.name, on=False)
            after = codes_of(targets)
            left = [target for target in before if after[target] != before[target]]
            if row.status is not Status.DISABLED or left:
                raise AssertionError(f"{patch} was not reverted: {row.reason}; changed: {', '.join(left) or 'nothing'}")


def _patch(named: Patch | str) -> Patch:
    try:
        patch = engine.definition(named) if isinstance(named, str) else named
    except SettingsError as error:
        raise SettingsError(f"{error}\nIf its plugin is not installed, install it, or pass the Patch itself") from None
    if not isinstance(patch, Patch):
        given = str(patch) if isinstance(patch, KnownBug) else repr(patch)
        raise TypeError(f"{given} cannot be applied: expected a Patch, or the name of a registered one")
    return patch


def _imported(variant: Variant) -> list[str]:
    """Import a variant's modules; for a variant with independent modules, those that can be imported here."""
    imported, errors = [], []
    for module in variant.modules:
        try:
            import_all([module])
            imported.append(module)
        except ImportError as error:
            errors.append(error)
    if errors and not (imported and variant.independent):
        raise errors[0]
    return imported


def life(patch: KnownBug, variant: Variant) -> dict[str, Any]:
    """Apply a patch, revert it, and apply it while RLHF_PATCHES_DISABLE names it. Imports the variant's modules.

    Returns:
        ``functions``: the functions that the variant changes. ``applied``, ``reverted``, ``disabled``: each with
        ``status``, ``reason``, and ``own code``, whether each function had its original code objects.
    """
    import_all(variant.modules)
    targets = list(dict.fromkeys(change.target for change in variant.changes))
    states: dict[str, Any] = {"functions": targets}
    with engine.set_apart(patch), _environment():
        before = codes_of(targets)

        def note(what: str, row: PatchReport) -> None:
            now = codes_of(targets)
            own = [
                len(now[target]) == len(codes) and all(map(operator.is_, now[target], codes))
                for target, codes in before.items()
            ]
            states[what] = {"status": row.status.value, "reason": row.reason, "own code": own}

        note("applied", engine.switch(patch.name, on=True))
        note("reverted", engine.switch(patch.name, on=False))
        os.environ["RLHF_PATCHES_DISABLE"] = patch.name
        note("disabled", engine.switch(patch.name, on=True))
    return states


def import_all(modules: Iterable[str]) -> None:
    """Import modules in order."""
    for module in modules:
        importlib.import_module(module)


def codes_of(targets: Iterable[str]) -> dict[str, list[CodeType]]:
    """By target, the code of the function and of those behind its decorators; empty for a missing target."""
    codes: dict[str, list[CodeType]] = {}
    for target in targets:
        module, _, qualname = target.partition(":")
        try:
            raw = functions.attribute(importlib.import_module(module), qualname).raw
            layers = list(functions.behind(raw, target))
        except Unrecognized:
            layers = []
        codes[target] = [layer.__code__ for layer in layers if type(layer) is FunctionType]
    return codes


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Remove the variables that select patches, and restore them at the end."""
    names = ("RLHF_PATCHES_DISABLE", "RLHF_PATCHES_ONLY")
    before = {name: os.environ.pop(name, None) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
