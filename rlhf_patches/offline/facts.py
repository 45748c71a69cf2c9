"""The results of a patch's shape guards in one release, without its version; and the ranges' claim for that version.

The record of releases and the survey of a plugin's patch compare the two.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet

from ..definitions.bug import KnownBug
from ..definitions.changes import Replace, Shape, Wrap
from ..definitions.variant import Variant
from ..guards import decision, fingerprints, known, shapes, sources, versions
from ..guards.edits import Unrecognized
from ..guards.places import NotFound, Source, Unreadable
from ..guards.versions import Verdict
from .archive import Release

DEFECT = "defect"
"""Recognized; for rewrites also: the edited module compiles, nothing but the function differs, no line moves."""
DIFFERENT = "different"
"""Every function exists, and at least one has other code than the patch expects."""
NO_FUNCTION = "no function"
NO_MODULE = "no module"
UNREADABLE = "unreadable"
LINES = re.compile(r" \(at line [0-9, ]+\)")
"""The lines in a shape guard's message, which change from release to release."""


@dataclass(frozen=True)
class Code:
    """The result of one variant's shape guard in one release.

    Attributes:
        state: one of the constants of this module.
        fingerprints: the target functions' fingerprints, in the order of the variant's targets; empty if one is
            missing.
        why: the shape guard's message; empty for DEFECT.
    """

    state: str
    fingerprints: tuple[str, ...] = ()
    why: str = ""

    @property
    def key(self) -> str:
        """The key of DIFFERENT code in ``reviewed.toml``."""
        return "+".join(self.fingerprints)


def examine(release: Release, patch: KnownBug) -> tuple[Code, ...]:
    """The result of each variant's shape guard in a release."""
    return tuple(_examine(release, variant) for variant in patch.variants)


def _examine(release: Release, variant: Variant) -> Code:
    try:
        texts = {module: release.source(module) for module in variant.modules}
    except NotFound as error:
        return Code(NO_MODULE, why=_without_label(release, error))
    except Unreadable as error:
        return Code(UNREADABLE, why=_without_label(release, error))
    try:
        fingerprints = tuple(_fingerprints(variant, texts))
        shapes.check_compiles(shapes.recognize_all(variant, texts), lines=True)
    except NotFound as error:
        return Code(NO_FUNCTION, why=_without_label(release, error))
    except Unreadable as error:
        return Code(UNREADABLE, why=_without_label(release, error))
    except Unrecognized as error:
        return Code(DIFFERENT, fingerprints, _without_label(release, error))
    return Code(DEFECT, fingerprints)


def is_known(release: Release, patch: KnownBug) -> bool:
    """Whether the package ships the search results for a release's texts, so that no process searches them."""
    for variant in patch.variants:
        for change in variant.changes:
            try:
                source = known.look_up(release.source(change.target.partition(":")[0]))
            except (NotFound, Unreadable):
                continue
            if known.find(change, source) is None:
                return False
    return True


def targets(variant: Variant) -> tuple[str, ...]:
    """The functions of a variant, each once."""
    functions = (change for change in variant.changes if not (isinstance(change, Shape) and change.of_a_module))
    return tuple(dict.fromkeys(change.target for change in functions))


def _fingerprints(variant: Variant, texts: dict[str, Source]) -> Iterator[str]:
    for change in variant.changes:
        if isinstance(change, Shape) and change.of_a_module:  # its other text is not reviewed separately
            sources.find_import(texts[change.target.partition(":")[0]], change.pattern)
    for target in targets(variant):
        module, _, qualname = target.partition(":")
        yield fingerprints.fingerprint_of(sources.find_function(texts[module], qualname))


def _without_label(release: Release, error: Exception) -> str:
    # File paths on the machine that made the record mean nothing to its readers, and lines move.
    return LINES.sub("", str(error).replace(f" in {release.label}", "").replace(f"{release.label}/", ""))


# ------------------------------------------------------------------------------------- what the facts mean


def recognized(patch: KnownBug, codes: Sequence[Code]) -> list[int]:
    """The numbers of the variants whose shape a release has; more than one is an error."""
    there = [variant for variant, one in zip(patch.variants, codes, strict=True) if one.state == DEFECT]
    return [patch.variants.index(variant) for variant in decision.widest(there)]


def counting(patch: KnownBug, codes: Sequence[Code]) -> Code:
    """The code that counts for a release: the recognized variant's, or else that of the closest variant."""
    for number in recognized(patch, codes):
        return codes[number]
    order = (UNREADABLE, DIFFERENT, NO_FUNCTION, NO_MODULE)
    return min(codes, key=lambda one: order.index(one.state))


def claimed(patch: KnownBug, version: str | None) -> int | None:
    """The number of the variant whose version guard claims the release."""
    for number, variant in enumerate(patch.variants):
        if versions.judge(variant.guard, version).verdict is Verdict.AFFECTED:
            return number
    return None


def may_lack(patch: KnownBug, version: str | None, codes: Sequence[Code]) -> bool:
    """Whether an affected release has no module to patch, and its variant's guard allows that."""
    number = claimed(patch, version)
    if number is None or patch.variants[number].guard.may_be_missing is None:
        return False
    return codes[number].state == NO_MODULE


def agrees(patch: KnownBug, version: str | None, codes: Sequence[Code]) -> bool:
    """Whether the ranges are right for a release: they claim exactly the releases with the variant's shape."""
    number = claimed(patch, version)
    return recognized(patch, codes) == ([] if number is None or may_lack(patch, version, codes) else [number])


def is_open(specifier: str) -> bool:
    """Whether a range has no bound on one side, so that it claims unreviewed releases."""
    pins = list(SpecifierSet(specifier))
    return {pin.operator[0] for pin in pins} < {"<", ">"} and [pin.operator for pin in pins] != ["=="]


def fingerprint_texts(patch: KnownBug) -> dict[tuple[str, str], str]:
    """By target and fingerprint, the releases that a patch's wraps and replacements list, verbatim."""
    return {
        (change.target, fingerprint): text
        for variant in patch.variants
        for change in variant.changes
        if isinstance(change, (Replace, Wrap))
        for fingerprint, text in change.fingerprints.items()
    }


def found_fingerprints(patch: KnownBug, codes: Sequence[Code], target: str) -> set[str]:
    """The fingerprints of a function in one release: one, or none if another function of the variant is missing."""
    return {
        fingerprint
        for variant, one in zip(patch.variants, codes, strict=True)
        for name, fingerprint in zip(targets(variant), one.fingerprints, strict=False)
        if name == target
    }
