"""Parse one entry of a list of distributions: a requirement, a wheel, or conda's notation. Nothing is guessed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import NamedTuple, Union

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, parse_wheel_filename

from . import allowed, names

EXPECTED = "expected releases such as trl==1.5.1, in a format that `audit --help` lists"
NEXT = "`pip freeze | rlhf-patches audit -` where it runs, or `uv pip compile FILE | rlhf-patches audit -`"
"""How to get the versions that a file does not have."""
COMMAND_LINE = "the command line"
"""The place of a requirement that is itself an argument."""

_SHOWN = 100  # characters of an unparsed entry that a message shows
_FILE = re.compile(r"[^\s;@]+\.(?:whl|zip|gz|bz2|conda)(?:[\s;#].*)?")
_EGG = re.compile(r"#(?:[^#]*&)?egg=([A-Za-z0-9][A-Za-z0-9_.-]*)")
_URL = re.compile(r"[\w+.-]+://")
# Require a platform's folder: an index may serve a source archive under such a name.
_CONDA_FILE = re.compile(r"/(?:noarch|[a-z]+-[a-z0-9_]+)/([^/\s]+?)-([^-/\s]+)-[^-/\s]+\.(?:conda|tar\.bz2)(?:#\S*)?$")
_CONDA = re.compile(r"(?:[^\s:]+::)?([A-Za-z0-9_][A-Za-z0-9_.-]*)(|\s*[=<>!~\[].*|\s+[\d*].*)", re.ASCII)
_CONDA_EXACT = re.compile(r"(?:==?\s*([\w.+!]+)\s*=\s*[\w.*+-]+|==\s*([\w.+!]+)|([0-9][\w.+!]*)(?:\s+[\w.*+-]+)?)")
_CONDA_BEGINS = re.compile(r"=\s*(\d+\.\d+\.\d+[\w.+!]*)")


class PinsError(Exception):
    """A file cannot be parsed in its format; the message has the file and the reason."""


class Pin(NamedTuple):
    """A distribution, as one place names it.

    Attributes:
        name: normalized.
        version: the exact version; None if the place does not pin one.
        place: the file, and the line if the format has lines.
        note: a marker, an extra, a source; or the reason for a missing version.
        allows: the versions that it allows, if it is a range.
    """

    name: str
    version: str | None
    place: str
    note: str = ""
    allows: SpecifierSet | None = None


class Unread(NamedTuple):
    """An entry that does not identify a release, or is not understood.

    Attributes:
        place: the file, and the line if the format has lines.
        why: a phrase that quotes the entry.
        mention: if the entry counts only when it names a framework, the text to search.
    """

    place: str
    why: str
    mention: str | None = None


Entry = Union[Pin, Unread]


def shown(text: str) -> str:
    """A part of an entry for a message."""
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}..."


def notes(*parts: str) -> str:
    """Join the nonempty parts to one note."""
    return "; ".join(filter(None, parts))


def of_requirement(text: str, where: str, note: str = "") -> Iterator[Entry]:
    """Parse a requirement, or the plain address of a wheel."""
    if _FILE.fullmatch(text):  # also valid as a name
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
    only = allowed.only(name, requirement.specifier)
    if only:
        yield Pin(name, only, where, notes(note, marker))
    else:
        range_ = f"{requirement.specifier}" or "any version"
        yield Pin(name, None, where, notes(f"not pinned: {range_}", note, marker), requirement.specifier)


def _of_address(text: str, where: str, note: str) -> Entry:
    address, _, marker = (part.strip() for part in text.partition(" ;"))
    wheel = _of_wheel(address)
    if wheel is not None:
        return Pin(*wheel, where, notes(f"from {address}", note, f"where {marker}" if marker else ""))
    conda = _CONDA_FILE.search(address) if _URL.match(address) else None
    if conda is not None:
        return Pin(names.of_conda(conda[1]), conda[2], where, note)
    egg = _EGG.search(address)
    if egg is not None:
        return Pin(canonicalize_name(egg[1]), None, where, notes(f"from {address}", note))
    if _URL.match(address) or address.startswith((".", "/", "~")):
        return Unread(where, f"{shown(address)} does not identify a distribution and release")
    return Unread(where, f"{shown(text)} is not a requirement (name==version)")


def _of_wheel(url: str) -> tuple[str, str] | None:
    try:
        name, version, *_ = parse_wheel_filename(os.path.basename(url.partition("#")[0].partition("?")[0]))
        return name, str(version)
    except ValueError:  # InvalidWheelFilename, or more digits than Python converts
        return None


def of_conda(text: str, where: str, note: str = "") -> Entry:
    """Parse a conda package: ``trl=1.5.1=build``, ``trl ==1.5.1``, ``trl 1.5.1``, ``trl >=1.5``.

    `conda env export --no-builds` writes ``=1.5.1`` for an exact version, so it counts as exact, with a note;
    ``=1.5`` is a range.
    """
    read = _CONDA.fullmatch(text.strip())
    if read is None:
        return Unread(where, f"{shown(text)} is not a conda package (name=version)")
    name, rest = names.of_conda(read[1]), read[2].strip()
    exact = _CONDA_EXACT.fullmatch(rest)
    if exact is not None:
        return Pin(name, exact[1] or exact[2] or exact[3], where, note)
    begins = _CONDA_BEGINS.fullmatch(rest)
    if begins is not None:
        return Pin(name, begins[1], where, notes(f"conda's {rest}", note))
    return Pin(name, None, where, notes(f"not pinned: {rest or 'any version'}", note))
