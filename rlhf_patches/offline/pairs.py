"""Pairs of releases whose import is known to fail: pairs.json is the record of them.

release_record/pairs.py writes the record, from wheels alone. Pairs that are not in the record are unknown.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from .pins import Pin

_SHOWN = 3  # names of modules that cannot be imported


class Row(NamedTuple):
    """One failure, with the releases that have it; the keys of the file.

    Attributes:
        caller, versions: the distribution whose import fails, and its releases.
        other, beside: the distribution that it imports from, and the releases that lack the import.
        module, name: the missing name of a module; without a name, the missing module.
        entries: the modules of the caller that cannot be imported.
        pin: the releases of the other distribution that have it and that the caller's metadata allow; empty if none.
    """

    caller: str
    versions: str
    other: str
    beside: str
    module: str
    name: str
    entries: tuple[str, ...]
    pin: str


class Failing(NamedTuple):
    """Two pins that are known to fail together.

    Attributes:
        pin: the caller's pin.
        other: name and version of the other distribution.
        rows: the failures, at least one.
    """

    pin: Pin
    other: tuple[str, str]
    rows: tuple[Row, ...]

    @property
    def entries(self) -> tuple[str, ...]:
        """The modules of the caller that cannot be imported, each once."""
        return tuple(dict.fromkeys(entry for row in self.rows for entry in row.entries))

    @property
    def lacks(self) -> tuple[str, ...]:
        """The names that the other distribution lacks, each with its module."""
        return tuple(f"{row.module}.{row.name}" if row.name else row.module for row in self.rows)

    @property
    def pins(self) -> str:
        """A requirement for releases of the other distribution that work; empty if the caller allows none."""
        name = self.other[0]
        if not all(row.pin for row in self.rows):
            return ""
        bounds = {row.pin for row in self.rows}
        below = min((Version(pin[1:]) for pin in bounds if pin.startswith("<")), default=None)
        above = max((Version(pin[2:]) for pin in bounds if pin.startswith(">=")), default=None)
        if below and above and above >= below:
            return ""
        return name + ",".join([f">={above}"] * bool(above) + [f"<{below}"] * bool(below))

    @property
    def text(self) -> str:
        """`why`, with release and place."""
        return f"{self.pin.name} {self.pin.version} ({self.pin.place}): {self.why}"

    @property
    def why(self) -> str:
        """One sentence: the modules that fail, the missing names, and the release to pin."""
        named, lacks = self.entries[:_SHOWN], self.lacks
        more = len(self.entries) - len(named)
        what = ", ".join(named) + (f" and {more} more" if more else "")
        want = lacks[0] + (f" and {len(lacks) - 1} more" if len(lacks) > 1 else "")
        do = f"pin {self.pins}" if self.pins else f"no {self.other[0]} that its metadata allow has all of them"
        return f"{what} cannot be imported with {' '.join(self.other)}, which has no {want}: {do}"


def failing(pins: Iterable[Pin], reported: Mapping[Pin, str]) -> list[Failing]:
    """Pairs of pins that are known to fail, in the order of the callers.

    Args:
        pins: as in `audit`.
        reported: by pin, the error texts of its known bugs with another distribution; a failure with such a text is
            reported with the bug, which may have a repair.
    """
    pins = list(pins)
    versions: dict[str, dict[str, Version]] = {}
    for pin in pins:
        if pin.version is not None:
            try:
                versions.setdefault(pin.name, {})[pin.version] = Version(Version(pin.version).public)
            except ValueError:  # InvalidVersion, or more digits than Python converts
                continue
    pairs = []
    for pin in pins:
        own = versions.get(pin.name, {}).get(pin.version or "")
        if own is None:
            continue
        rows = [
            row
            for row in _of(pin.name)
            if _holds(row.versions, own) and not (row.name and row.name in reported.get(pin, ""))
        ]
        for other in dict.fromkeys(row.other for row in rows):
            for text, version in versions.get(other, {}).items():
                here = tuple(row for row in rows if row.other == other and _holds(row.beside, version))
                if here:
                    pairs.append(Failing(pin, (other, text), here))
    return pairs


@cache
def _holds(versions: str, version: Version) -> bool:
    return SpecifierSet(versions).contains(version, prereleases=True)


def _of(caller: str) -> Sequence[Row]:
    return [row for row in record() if row.caller == caller]


@cache
def record() -> tuple[Row, ...]:
    """All known failures."""
    text = files(__package__).joinpath("pairs.json").read_text(encoding="utf-8")
    return tuple(Row(**{**row, "entries": tuple(row["entries"])}) for row in json.loads(text))
