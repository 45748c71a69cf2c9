"""Releases that fail at an import beside each other, as far as that is known: pairs.json is the record of them.

release_record/pairs.py has made it, from wheels alone. It says "known to fail", and of the rest nothing.
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

_SHOWN = 3  # modules that cannot be imported, by name


class Row(NamedTuple):
    """One failure, with the releases that have it; the keys of the file.

    Attributes:
        caller, versions: the distribution whose import fails, and which releases of it.
        other, beside: the one that it imports from, and which releases of that lack what it wants.
        module, name: what they lack: a name of a module, or without a name the module.
        entries: the modules of the caller that cannot be imported.
        pin: which releases of the other one have it, as far as the caller's metadata allow them; empty where none has.
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
        pin: the caller's.
        other: name and version of the other one.
        rows: why, one at least.
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
        """What the other one lacks, each with its module."""
        return tuple(f"{row.module}.{row.name}" if row.name else row.module for row in self.rows)

    @property
    def pins(self) -> str:
        """What of the other one would do, as a requirement; empty where the caller allows nothing that does."""
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
        """The sentence of `why`, with release and place."""
        return f"{self.pin.name} {self.pin.version} ({self.pin.place}): {self.why}"

    @property
    def why(self) -> str:
        """What fails, for want of what, and which release to pin: one sentence."""
        named, lacks = self.entries[:_SHOWN], self.lacks
        more = len(self.entries) - len(named)
        what = ", ".join(named) + (f" and {more} more" if more else "")
        want = lacks[0] + (f" and {len(lacks) - 1} more" if len(lacks) > 1 else "")
        do = f"pin {self.pins}" if self.pins else f"no {self.other[0]} that its metadata allow has all of it"
        return f"{what} cannot be imported with {' '.join(self.other)}, which has no {want}: {do}"


def failing(pins: Iterable[Pin], told: Mapping[Pin, str]) -> list[Failing]:
    """Pairs of pins that are known to fail, in the order of the callers.

    Args:
        pins: as those of `audit`.
        told: of a pin the error texts of the known bugs that it has beside another distribution; a failure with such a
            text is said there, with the repair if there is one.
    """
    pins = list(pins)
    versions: dict[str, dict[str, Version]] = {}
    for pin in pins:
        if pin.version is not None:
            try:
                versions.setdefault(pin.name, {})[pin.version] = Version(Version(pin.version).public)
            except ValueError:  # InvalidVersion, or more digits than Python converts
                continue
    found = []
    for pin in pins:
        own = versions.get(pin.name, {}).get(pin.version or "")
        if own is None:
            continue
        rows = [
            row
            for row in _of(pin.name)
            if _holds(row.versions, own) and not (row.name and row.name in told.get(pin, ""))
        ]
        for other in dict.fromkeys(row.other for row in rows):
            for text, version in versions.get(other, {}).items():
                here = tuple(row for row in rows if row.other == other and _holds(row.beside, version))
                if here:
                    found.append(Failing(pin, (other, text), here))
    return found


@cache
def _holds(versions: str, version: Version) -> bool:
    return SpecifierSet(versions).contains(version, prereleases=True)


def _of(caller: str) -> Sequence[Row]:
    return [row for row in record() if row.caller == caller]


@cache
def record() -> tuple[Row, ...]:
    """All that is known."""
    text = files(__package__).joinpath("pairs.json").read_text(encoding="utf-8")
    return tuple(Row(**{**row, "entries": tuple(row["entries"])}) for row in json.loads(text))
