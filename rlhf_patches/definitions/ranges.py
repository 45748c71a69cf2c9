"""Ranges of versions by PEP 440; simple ones are compared without packaging.

The import of packaging takes 20 ms, mostly for wheel tags, and `apply` checks every installed framework. A release
without suffix (0.16.1), and a comparison with one or with its pre-, post- or development releases, need only the order
of their numbers.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from .errors import DefinitionError

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

_Place = tuple[tuple[int, ...], int]
"""A release's numbers without trailing zeros; and -1 before that release, 1 after it, 0 for the release itself."""

# Numbers of a length that Python converts. packaging parses all other spellings.
_RELEASE = r"([0-9]{1,18}(?:\.[0-9]{1,18})*)"
_SUFFIX = r"((?:a|b|rc|\.post|\.dev)[0-9]{1,18})?"
_LOCAL = re.compile(r"\+[a-z0-9]+(?:\.[a-z0-9]+)*\Z")  # torch's name the build of CUDA
_COMPARED: dict[str, Callable[[_Place, _Place], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


@functools.cache
def parsed(versions: str, owner: str = "Guard") -> SpecifierSet:
    """Return packaging's specifier set; callers must not change it.

    Args:
        versions: the specifier.
        owner: its owner, for the message.

    Raises:
        DefinitionError: it is not a PEP 440 specifier.
    """
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        return SpecifierSet(versions)
    except InvalidSpecifier as error:
        raise DefinitionError(
            f"{owner}.versions is {versions!r}: expected a PEP 440 specifier such as '>=0.9.0,<0.17' ({error})"
        ) from error


def check(versions: str, owner: str = "Guard") -> None:
    """Check a specifier.

    Raises:
        DefinitionError: it is not a PEP 440 specifier.
    """
    if _plain(versions) is None:
        parsed(versions, owner)


def plainly_contains(versions: str, version: str) -> bool | None:
    """Whether a version is in a range, if both are simple; None if packaging is required."""
    release, comparisons = _release(version), _plain(versions)
    if release is None or comparisons is None:
        return None
    return all(holds(release, bound) for holds, bound in comparisons)


def ends_before(versions: str, version: str) -> bool:
    """Whether a range ends with the newest reviewed release (``<=5.23.0``), and a version is newer."""
    release, comparisons = _release(version), _plain(versions)
    if release is not None and comparisons is not None:
        return any(holds is operator.le and not holds(release, bound) for holds, bound in comparisons)
    return any(
        pin.operator == "<=" and not parsed(f"<={pin.version}").contains(version, prereleases=True)
        for pin in parsed(versions)
    )


def end(ranges: Iterable[str]) -> tuple[str, str] | None:
    """Return the end of the last of several ranges: ``("<", "1.5")`` or ``("<=", "1.9")``; None if one has no end."""
    from packaging.version import Version

    ends = []
    for versions in ranges:
        bounds = [(Version(pin.version), pin.operator, pin.version) for pin in parsed(versions)]
        bounds = [bound for bound in bounds if bound[1] in ("<", "<=")]
        if not bounds:
            return None
        ends.append(min(bounds))  # "<" sorts before "<="
    _, sign, version = max(ends)
    return sign, version


def plainly_apart(one: str, other: str) -> bool:
    """Whether two ranges certainly do not overlap: one ends before the other begins."""
    both = [_plain(versions) or () for versions in (one, other)]
    return any(
        end[0] < start[0] or (end == start == (end[0], 0) and (ends is operator.lt or starts is operator.gt))
        for below, above in (both, both[::-1])
        for ends, end in below
        for starts, start in above
        if ends in (operator.lt, operator.le, operator.eq) and starts in (operator.gt, operator.ge, operator.eq)
    )


@functools.cache
def _plain(versions: str) -> tuple[tuple[Callable[[_Place, _Place], bool], _Place], ...] | None:
    """Return the comparisons of a specifier; None if one is not simple."""
    comparisons = []
    for item in filter(None, map(str.strip, versions.split(","))):
        sign = item[:2] if item[:2] in _COMPARED else item[:1]
        bound = _place(item[len(sign) :].strip())
        if sign not in _COMPARED or bound is None:
            return None
        comparisons.append((_COMPARED[sign], bound))
    return tuple(comparisons)


def _release(version: str) -> _Place | None:
    """Return the numbers of a simple release, without a local version (2.13.0+cpu is 2.13.0); None for any other."""
    place = _place(_LOCAL.sub("", version))
    return None if place is None or place[1] else place


@functools.cache
def _place(version: str) -> _Place | None:
    read = re.fullmatch(_RELEASE + _SUFFIX, version)
    if read is None:
        return None
    numbers = [int(number) for number in read[1].split(".")]
    while numbers and not numbers[-1]:
        numbers.pop()
    suffix = read[2] or ""
    return tuple(numbers), 0 if not suffix else 1 if suffix.startswith(".post") else -1
