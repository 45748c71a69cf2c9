"""The shape guard: whether a module's text contains the code that a change was written for."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from types import CodeType
from typing import NamedTuple

from ..definitions.changes import Change, Replace, Rewrite, Shape, Wrap
from ..definitions.variant import Variant
from . import fingerprints, known, patterns, rewriting, sources
from .edits import Edit, NoEffect, Unrecognized
from .places import NotFound, Place, Source


class Recognized(NamedTuple):
    """A change's target, located in a module's text. ``edits`` is empty unless the change is a `Rewrite`.

    ``fingerprint`` is the matching one, None for other guards.
    """

    change: Change
    source: Source
    place: Place
    edits: tuple[Edit, ...]
    fingerprint: str | None = None

    @property
    def qualname(self) -> str:
        """The function's qualified name in the target."""
        return self.change.target.partition(":")[2]

    def original_code(self) -> CodeType:
        """Compile the function's code from the source on disk."""
        return rewriting.code_of(rewriting.compile_around(self.source, self.place), self.place)

    def in_the_whole(self) -> Recognized:
        """Return a copy that is compiled with its whole module."""
        return self._replace(place=self.place._replace(slice=None))


def recognize(change: Change, source: Source) -> Recognized:
    """Locate a change's target in a module's text and apply its shape guard.

    Raises:
        Unrecognized: the function does not exist, or is not as expected.
        Unreadable: the text does not parse.
    """
    result = known.find(change, source)
    if result is None:
        result = _find(change, source)
    if isinstance(result, str):
        raise Unrecognized(result)
    place, edits, fingerprint = result
    if isinstance(change, (Replace, Wrap)) and change.fingerprints and fingerprint not in change.fingerprints:
        raise Unrecognized(f"{change.target} has the fingerprint {fingerprint}, which no reviewed release has")
    return Recognized(change, source, place, edits, fingerprint)


def _find(change: Change, source: Source) -> known.Found | str:
    """Return the target's place, the edits and the fingerprint; or why it is not recognized."""
    try:
        if isinstance(change, Shape) and change.of_a_module:
            return sources.place_in_module(sources.find_import(source, change.pattern)), (), None
        node = sources.find_function(source, change.target.partition(":")[2])
        place = sources.place_of(node)
        if isinstance(change, Rewrite):
            return place, tuple(patterns.find_edits(change, source, place)), None
        if isinstance(change, Shape):
            patterns.find(change, source, place)
            return place, (), None
    except (NotFound, Unrecognized) as error:
        return str(error)
    if isinstance(change, Wrap) and change.signature:
        signature = fingerprints.signature_of(node)
        if signature == change.signature:
            return place, (), None
        return f"{change.target} has the signature {signature}, expected {change.signature}"
    return place, (), fingerprints.fingerprint_of(node)


def recognize_all(variant: Variant, texts: Mapping[str, Source]) -> list[Recognized]:
    """Call `recognize` for every change of a variant; ``texts`` has the source of each of its modules."""
    for path in (*variant.where_defined, *variant.unless_defined):
        module, _, qualname = path.partition(":")
        if _defines(texts[module], qualname) == (path in variant.unless_defined):
            what = "defined, unlike" if path in variant.unless_defined else "not defined, unlike"
            raise Unrecognized(f"{path} is {what} in code with the defect")
    return [recognize(change, texts[change.target.partition(":")[0]]) for change in variant.changes]


def _defines(source: Source, qualname: str) -> bool:
    if f"def {qualname.rpartition('.')[2]}" not in source.text:  # without parsing
        return False
    try:
        sources.find_function(source, qualname)
    except NotFound:
        return False
    return True


def check_compiles(recognized: list[Recognized], lines: bool = False) -> None:
    """Check that the rewrites of a patch compile and change only their functions.

    With ``lines``, also check that no line of the module moves. Rewrites never move lines by construction; the engine
    skips the check to start fast, and tests and ``rlhf-patches check`` run it.

    Raises:
        Unrecognized: they do not.
        Undefined: the new code uses an undefined name.
        NoEffect: under ``python -O`` none of them has an effect.
    """
    idle: NoEffect | None = None
    effective = False
    for changes in by_function(recognized).values():
        first = changes[0]
        edits = combined([item.edits for item in changes], first.change.target)
        try:
            if edits:
                rewriting.rewrite_code(first.source, first.place, edits)
                if lines:
                    rewriting.check_lines(first.source, edits)
            effective = True
        except NoEffect as error:
            idle = error
    if idle is not None and not effective:
        raise idle


def by_function(recognized: list[Recognized]) -> dict[str, list[Recognized]]:
    """Group the changes of one patch by target, in order."""
    groups: dict[str, list[Recognized]] = {}
    for item in recognized:
        groups.setdefault(item.change.target, []).append(item)
    return groups


def combined(groups: list[tuple[Edit, ...]], target: str) -> list[Edit]:
    """Return all edits of several rewrites of one function.

    Raises:
        Unrecognized: two of them touch the same characters.
    """
    edits = sorted(edit for group in groups for edit in group)
    if any(first.overlaps(second) for first, second in itertools.pairwise(edits)):
        raise Unrecognized(f"two rewrites of {target} touch the same code")
    return edits
