"""The definitions of a patch, an advice and a watch: immutable data that checks itself and is cheap to import.

A patch names the code that it repairs as ``module:qualified.name`` and never imports it. Implementations
are named the same way and are imported only when their target is patched, so that listing patches never
imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from .bug import KnownBug, Signature
from .changes import Wrap
from .checks import check_items, check_path, check_types, names_fields, shown
from .errors import DefinitionError
from .listed import ADVICE, PATCH, WATCH
from .variant import Variant


@names_fields
@dataclass(frozen=True)
class Condition:
    """When a bug occurs in a call of a function, from the call's arguments alone; reports count it.

    Attributes:
        target: the function, the target of one of the changes.
        predicate: ``module:qualified.name``, a function of some of the target's parameters, by name. It returns whether
            the bug occurs in this call: False, True, or a number as its measure; None if that is unknown. It runs in
            every call of the target, so it reads attributes and shapes, never a tensor's values (which wait for a GPU),
            and changes nothing. Empty if only the repair can decide (`rlhf_patches.decided`).
        measure: the name of the number, put before it: ``divisor x``.
    """

    target: str
    predicate: str = ""
    measure: str = ""

    def __post_init__(self) -> None:
        check_types(self, "Condition.")
        check_path(self.target, "Condition.target")
        if self.predicate:
            check_path(self.predicate, "Condition.predicate")


@names_fields
@dataclass(frozen=True)
class Patch(KnownBug):
    """One known bug and its repair.

    Attributes:
        repair: what the patch changes, and what it does not change (Markdown).
        observations: ``module:function``, which returns what the patch has done so far in this process, as a
            dictionary of plain values (``{"backward in place": 3}``), for reports. It is called only if the module is
            already imported, so it belongs to the module of the implementation, or near it.
        changes_numbers: for a repair that changes results: what was wrong, since which release, and what a run that was
            trained with it should do. One paragraph. The page has it as a section; ``doctor``, ``check`` and reports
            show it with the patch; the log states it once when the patch is applied.
        contested: the positions, in one line, if upstream does not agree that it is a bug; or the runs for which the
            patch is correct. Such a patch is off unless it is enabled by its name, for example in
            ``RLHF_PATCHES_ENABLE``.
        conditions: when the bug occurs in a call of a target, so that reports state whether a run was affected.
    """

    kind = PATCH
    name: str
    summary: str
    symptom: str
    cause: str
    repair: str
    references: tuple[str, ...]
    variants: tuple[Variant, ...]
    obsolete_when: str
    observations: str | None = None
    changes_numbers: str | None = None
    signatures: tuple[Signature, ...] = ()
    contested: str = ""
    harm: str = ""
    bug: str = ""
    when: str = ""
    excluded_by: tuple[str, ...] = ()
    affects_rollouts: bool = False
    conditions: tuple[Condition, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_conditions(self)
        if "\n" in self.contested or self.contested != self.contested.strip():
            raise DefinitionError(f"{self}: contested is {shown(self.contested)}; expected one line, or nothing")
        if any(variant.is_advice for variant in self.variants):
            raise DefinitionError(f"{self}: a variant has shapes and no change; expected changes, or an Advice")
        if self.observations is not None:
            check_path(self.observations, f"{self}: observations")
        if self.changes_numbers is not None and not self.changes_numbers.strip():
            raise DefinitionError(
                f"{self}: changes_numbers is empty; expected what was wrong, since which release, and "
                "what a run that was trained with it should do, or None"
            )

    @classmethod
    def _texts(cls) -> tuple[str, ...]:
        return *super()._texts(), "repair"


@names_fields
@dataclass(frozen=True)
class Advice(KnownBug):
    """One known bug without a repair, and what to do about it. It is recognized and reported, and changes nothing.

    Attributes:
        what_to_do: the release or the setting without the bug. One paragraph: ``doctor``, ``check`` and reports show it
            below the entry. The log states it as a warning: once per process that imports the code, or, with
            conditions, once when the bug occurs in the run.
        conditions: when the bug occurs in a call of a target, each with a ``predicate``. Calls of these functions are
            counted; the functions are unchanged.
    """

    kind = ADVICE
    name: str
    summary: str
    symptom: str
    cause: str
    what_to_do: str
    references: tuple[str, ...]
    variants: tuple[Variant, ...]
    obsolete_when: str
    signatures: tuple[Signature, ...] = ()
    harm: str = ""
    bug: str = ""
    when: str = ""
    excluded_by: tuple[str, ...] = ()
    affects_rollouts: bool = False
    conditions: tuple[Condition, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_conditions(self)
        if not all(each.predicate for each in self.conditions):
            raise DefinitionError(
                f"{self}: a condition has no predicate; expected one: an advice has no repair that decides"
            )
        if not all(variant.is_advice for variant in self.variants):
            raise DefinitionError(f"{self}: a variant has changes; expected shapes, since an advice changes nothing")

    @classmethod
    def _texts(cls) -> tuple[str, ...]:
        return *super()._texts(), "what_to_do"


@names_fields
@dataclass(frozen=True)
class Watch(KnownBug):
    """A check of values that a framework already has; it warns once if a figure of the run exceeds its limit.

    It changes no result and no state of the framework: no forward pass, no collective, no GPU synchronization.
    All its changes are a `Wrap`, which wraps the function together with its patches; its implementations record figures
    (`rlhf_patches.watching`).

    Attributes:
        symptom: what it logs (Markdown).
        cause: the possible causes (Markdown).
        looks_at: the values that it reads, where, and at what cost (Markdown).
        limits: each figure with its limit, and the reason for it (Markdown).
        points_to: patches and advices for bugs that have this sign.
        observations: ``module:function``: the figures so far, as for a `Patch`.
    """

    kind = WATCH
    name: str
    summary: str
    symptom: str
    cause: str
    looks_at: str
    limits: str
    points_to: tuple[str, ...]
    references: tuple[str, ...]
    variants: tuple[Variant, ...]
    obsolete_when: str
    observations: str
    signatures: tuple[Signature, ...] = ()
    harm: str = ""
    bug: str = ""
    when: str = ""
    excluded_by: tuple[str, ...] = ()
    affects_rollouts: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_path(self.observations, f"{self}: observations")
        if not all(isinstance(change, Wrap) for variant in self.variants for change in variant.changes):
            raise DefinitionError(f"{self}: a variant has a change that is not a Wrap; expected only Wraps")

    @classmethod
    def _texts(cls) -> tuple[str, ...]:
        return *super()._texts(), "looks_at", "limits"


def _check_conditions(bug: Patch | Advice) -> None:
    if bug.conditions != ():
        check_items(str(bug), "conditions", bug.conditions, Condition)
    targets = dict.fromkeys(change.target for variant in bug.variants for change in variant.changes)
    for condition in bug.conditions:
        if condition.target not in targets:
            raise DefinitionError(
                f"{bug}: a condition has the target {condition.target}; expected one of {', '.join(targets)}"
            )
