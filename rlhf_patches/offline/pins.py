"""What one entry of a list of distributions names: a requirement, a wheel, conda's notation. Nothing is guessed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import NamedTuple, Union

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

EXPECTED = "expected releases such as trl==1.5.1, in one of the formats that `audit --help` names"

_SHOWN = 100  # characters of an entry that was not understood
_FILE = re.compile(r"[^\s;@]+\.(?:whl|zip|gz|bz2|conda)(?:[\s;#].*)?")
_EGG = re.compile(r"#(?:[^#]*&)?egg=([A-Za-z0-9][A-Za-z0-9_.-]*)")
_URL = re.compile(r"[\w+.-]+://")
# The folder is that of a platform; what an index serves under such a name may be a source archive.
_CONDA_FILE = re.compile(r"/(?:noarch|[a-z]+-[a-z0-9_]+)/([^/\s]+?)-([^-/\s]+)-[^-/\s]+\.(?:conda|tar\.bz2)(?:#\S*)?$")
_CONDA = re.compile(r"(?:[^\s:]+::)?([A-Za-z0-9_][A-Za-z0-9_.-]*)(|\s*[=<>!~\[].*|\s+[\d*].*)", re.ASCII)
_CONDA_EXACT = re.compile(r"(?:==?\s*([\w.+!]+)\s*=\s*[\w.*+-]+|==\s*([\w.+!]+)|([0-9][\w.+!]*)(?:\s+[\w.*+-]+)?)")
_CONDA_BEGINS = re.compile(r"=\s*(\d+\.\d+\.\d+[\w.+!]*)")


class PinsError(Exception):
    """A file cannot be read as what it is; the message says which and why."""


class Pin(NamedTuple):
    """A distribution, as one place names it.

    Attributes:
        name: normalised.
        version: the one and only; None where the place does not say.
        place: the file, and the line where there are lines.
        note: a marker, an extra, a source; or why there is no version.
    """

    name: str
    version: str | None
    place: str
    note: str = ""


class Unread(NamedTuple):
    """An entry that does not tell what it names, or is not understood.

    Attributes:
        place: the file, and the line where there are lines.
        why: a phrase with what stands there.
        mention: where the entry counts only if it names a framework, the text to look in.
    """

    place: str
    why: str
    mention: str | None = None


Entry = Union[Pin, Unread]


def shown(text: str) -> str:
    """A piece of an entry for a message."""
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}..."


def notes(*parts: str) -> str:
    """Those that are not empty, as one note."""
    return "; ".join(filter(None, parts))


def of_requirement(text: str, where: str, note: str = "") -> Iterator[Entry]:
    """What a requirement says, or the address of a wheel without more."""
    if _FILE.fullmatch(text):  # which would pass for a name
        yield _of_address(text, where, note)
        return
    try:
        requirement = Requirement(text)
        marker = f"where {requirement.marker}" if requirement.marker else ""
    except (InvalidRequirement, RecursionError) as error:
        # packaging has a limit since 26.4
        if isinstance(error, RecursionError) or str(error).startswith("Marker expression is nested"):
            yield Unread(where, "nested too deeply to be read")
        else:
            yield _of_address(text, where, note)
        return
    name = canonicalize_name(requirement.name)
    if requirement.url:
        wheel = _of_wheel(requirement.url)
        yield Pin(name, wheel and wheel[1], where, notes(f"from {requirement.url}", note, marker))
        return
    pins = [each.version for each in requirement.specifier if each.operator in ("==", "===")]
    if len(pins) == 1 and not pins[0].endswith(".*"):
        yield Pin(name, pins[0], where, notes(note, marker))
    else:
        range_ = f"{requirement.specifier}" or "any version"
        yield Pin(name, None, where, notes(f"not pinned: {range_}", note, marker))


def _of_address(text: str, where: str, note: str) -> Entry:
    address, _, marker = (part.strip() for part in text.partition(" ;"))
    wheel = _of_wheel(address)
    if wheel is not None:
        return Pin(*wheel, where, notes(f"from {address}", note, f"where {marker}" if marker else ""))
    conda = _CONDA_FILE.search(address) if _URL.match(address) else None
    if conda is not None:
        return Pin(canonicalize_name(conda[1]), conda[2], where, note)
    egg = _EGG.search(address)
    if egg is not None:
        return Pin(canonicalize_name(egg[1]), None, where, notes(f"from {address}", note))
    if _URL.match(address) or address.startswith((".", "/", "~")):
        return Unread(where, f"{shown(address)} does not tell which release of what it is")
    return Unread(where, f"{shown(text)} is no requirement (name==version)")


def _of_wheel(url: str) -> tuple[str, str] | None:
    try:
        name, version, *_ = parse_wheel_filename(os.path.basename(url.partition("#")[0].partition("?")[0]))
        return name, str(version)
    except ValueError:  # InvalidWheelFilename, or more digits than Python converts
        return None


def of_conda(text: str, where: str, note: str = "") -> Entry:
    """What a package of conda's says: ``trl=1.5.1=build``, ``trl ==1.5.1``, ``trl 1.5.1``, ``trl >=1.5``.

    ``=1.5.1`` is what `conda env export --no-builds` writes for an exact version, so it counts as one, with a note;
    ``=1.5`` is a range.
    """
    read = _CONDA.fullmatch(text.strip())
    if read is None:
        return Unread(where, f"{shown(text)} is no package of conda's (name=version)")
    name, rest = canonicalize_name(read[1]), read[2].strip()
    exact = _CONDA_EXACT.fullmatch(rest)
    if exact is not None:
        return Pin(name, exact[1] or exact[2] or exact[3], where, note)
    begins = _CONDA_BEGINS.fullmatch(rest)
    if begins is not None:
        return Pin(name, begins[1], where, notes(f"conda's {rest}", note))
    return Pin(name, None, where, notes(f"not pinned: {rest or 'any version'}", note))
