"""What a patch is, an advice and a watch: immutable data, cheap to import, no behaviour beyond checking itself.

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
    """When a bug bites in a call of a function, told from the call's arguments alone: reports say how often it did.

    Attributes:
        target: the function, of one of the changes.
        predicate: ``module:qualified.name``, which takes parameters of the target by their names and returns whether
            the bug's condition holds in this call: False, True, or by how much, a number; None where that cannot be
            told. It is called in every call of the target, so it reads attributes and shapes, never a tensor's values
            (which wait for a GPU), and changes nothing. Empty where the repair alone can tell (`rlhf_patches.decided`).
        measure: what the number is, before it: ``divisor x``.
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
        repair: what the patch changes, and what it leaves alone (Markdown).
        observations: ``module:function``, which says what the patch has done so far in this process, as a
            dictionary of plain values (``{"backward in place": 3}``); reports show it. Called only if something
            else has imported the module, so it belongs to the module of the implementation, or near it.
        changes_numbers: for a repair of numbers that a user may have tuned to: what was wrong, since which release, and
            what a run that was trained with it should do. One paragraph. The page has it as a section, ``doctor``,
            ``check`` and reports beside the patch, and the log says it once when the patch is applied.
        contested: where upstream has not agreed that it is a bug, who holds what, or where it is right for some runs
            alone, which: in one line. Such a patch is off unless it is asked for by its name, in
            ``RLHF_PATCHES_ENABLE`` say.
        conditions: when the bug bites in a call of a target, so that reports say whether a run has suffered.
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
            raise DefinitionError(f"{self}: a variant has shapes and no change; expected an Advice, or changes")
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
    """One known bug that nothing here repairs, and what to do about it. It is recognised and told, and changes nothing.

    Attributes:
        what_to_do: which release or which setting does not have it. One paragraph: ``doctor``, ``check`` and reports
            show it below the entry. The log says it as a warning: once per process that imports the code, or, with
            conditions, once when the run meets the bug.
        conditions: when the bug bites in a call of a target, each with ``tells``. These functions are counted, and
            stay as released.
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
                f"{self}: a condition has no predicate; expected one, since an advice repairs nothing"
            )
        if not all(variant.is_advice for variant in self.variants):
            raise DefinitionError(f"{self}: a variant has changes, which an advice does not make; expected shapes")

    @classmethod
    def _texts(cls) -> tuple[str, ...]:
        return *super()._texts(), "what_to_do"


@names_fields
@dataclass(frozen=True)
class Watch(KnownBug):
    """A look at what a framework has at hand anyway, which says once when a figure of the run is out of its limit.

    It changes no result and no state of the framework's: no forward pass, no collective, no synchronisation of a GPU.
    Its changes are all a `Wrap`, which goes around whatever patches the function has, and its implementations note
    figures (`rlhf_patches.watching`).

    Attributes:
        symptom: what the log says (Markdown).
        cause: what it is a sign of (Markdown).
        looks_at: what is read, where it is, and what that costs (Markdown).
        limits: each figure with its limit, and the reason for it (Markdown).
        points_to: patches and advices for bugs that have this sign.
        observations: ``module:function``: the figures so far, as that of a `Patch`.
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
            raise DefinitionError(
                f"{self}: a variant has a change that is no Wrap; expected Wraps, which leave the code"
            )

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
                f"{bug}: a condition is of {condition.target}; expected a target, {', '.join(targets)}"
            )
