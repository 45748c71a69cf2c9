"""The releases that a version range allows, among those that the record of releases has read (versions.json)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

from packaging.specifiers import Specifier, SpecifierSet
from packaging.version import Version

_BELOW = (">=", ">", "~=", "==")


def reviewed(name: str, specifier: SpecifierSet) -> Sequence[str]:
    """The releases that the range allows and that were read, oldest first; no pre-releases, as pip's rule is."""
    return list(specifier.filter(_read().get(name, "").split()))


def only(name: str, specifier: SpecifierSet) -> str | None:
    """The one release that a range allows; None if there are several, or may be.

    ``==1.5.1`` and ``>=1.5.1,<=1.5.1`` name it. ``==2.6.0.*`` has one if the record has read what is around it.
    """
    pins = [each.version for each in specifier if each.operator in ("==", "===") and not each.version.endswith(".*")]
    if pins:
        return pins[0] if len(pins) == 1 else None
    lowest = {Version(each.version) for each in specifier if each.operator == ">="}
    both = [each.version for each in specifier if each.operator == "<=" and Version(each.version) in lowest]
    releases = _read().get(name, "").split()
    if both or not releases:
        return both[0] if both else None
    found = reviewed(name, specifier)
    return found[0] if len(found) == 1 and is_reviewed(name, specifier) else None


def is_reviewed(name: str, specifier: SpecifierSet) -> bool:
    """Whether every release that the range allows was read: none is older or newer than those."""
    releases = list(map(Version, _read().get(name, "").split()))
    return any(_is_from(each, releases[0]) for each in specifier) and any(
        _is_to(each, releases[-1]) for each in specifier
    )


def _is_from(part: Specifier, first: Version) -> bool:
    return part.operator in _BELOW and Version(part.version.removesuffix(".*")) >= first


def _is_to(part: Specifier, last: Version) -> bool:
    """Whether this part of a range allows no release later than this one."""
    if part.operator in ("<", "<="):
        return Version(part.version) <= last
    if part.operator not in ("==", "~="):
        return False
    release = Version(part.version.removesuffix(".*")).release
    prefix = release if part.operator == "==" else release[:-1]
    return (last.release + (0,) * len(prefix))[: len(prefix)] > prefix


@cache
def _read() -> dict[str, str]:
    shipped: dict[str, str] = json.loads(files(__package__).joinpath("versions.json").read_text(encoding="utf-8"))
    return shipped
