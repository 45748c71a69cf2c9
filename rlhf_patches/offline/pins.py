"""Which versions a requirements file, a lock file or an environment names. Nothing is guessed.

Requirements are parsed by packaging, TOML by the standard library (tomli before Python 3.11). Nothing is fetched,
imported or run.

What is read may have been made to do harm: each file has a bound, and so has the whole of what files name.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from . import inputs
from .inputs import InputError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_LARGEST = 16 * 2**20  # bytes of a file and of all that it names; the largest lock files have one MiB
_LONGEST = 2**18  # characters of a requirement, with its hashes
_DEEPEST = 50  # files that name each other
_MOST = 20_000  # pins of one file; the largest lock files have some thousands
# Keys of more parts take tomllib the square of them, each time that they occur.
_DEEP_KEY = re.compile(r"""(?<![\w."'-])(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){32}""", re.ASCII)


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


def installed() -> list[Pin]:
    """What is installed here, in the order in which Python would find it."""
    found: dict[str, Pin] = {}
    for distribution in importlib.metadata.distributions():
        try:
            name, version = distribution.metadata["Name"], distribution.metadata["Version"]
            direct = json.loads(distribution.read_text("direct_url.json") or "{}")
        except Exception:  # half removed, or damaged
            continue
        if name:
            note = f"from {direct['url']}" if isinstance(direct, dict) and direct.get("url") else ""
            found.setdefault(canonicalize_name(name), Pin(canonicalize_name(name), version, "this environment", note))
    return list(found.values())


def read(path: str) -> list[Pin]:
    """What a file names; ``-`` is standard input, which has requirements (``pip freeze``).

    Raises:
        PinsError: it cannot be read, or is none of the formats.
    """
    found: dict[tuple[str, str | None, str, str], Pin] = {}
    for pin in _of_file(path):
        # Of lines that say the same the first.
        found.setdefault((pin.name, pin.version, pin.note, pin.place.rpartition(":")[0]), pin)
        if len(found) > _MOST:
            raise PinsError(f"{path} names more than {_MOST} releases: expected a requirements or a lock file")
    return list(found.values())


def _of_file(path: str) -> Iterator[Pin]:
    try:
        if path == "-":
            yield from _Requirements().read(inputs.text(path, _LARGEST), "standard input", None)
            return
        file = Path(path)
        if file.suffix not in (".toml", ".lock"):
            yield from _Requirements().include(file)
            return
        text = _text(file, _LARGEST)
    except InputError as error:
        raise PinsError(str(error)) from error
    if _DEEP_KEY.search(text):
        raise PinsError(f"{path} has a key of more than 32 parts, which no lock file has")
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # more digits than Python converts; nested too deeply
        raise PinsError(f"{path} is no TOML: {error}") from error
    try:
        if "package" in data or "packages" in data:  # uv.lock and poetry.lock; pylock.toml
            yield from _locked(data.get("package") or data["packages"], path)
            return
        if "project" in data or "tool" in data or "dependency-groups" in data:
            yield from _project(data, path)
            return
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise PinsError(f"{path} is not as expected of its format: {type(error).__name__}: {error}") from error
    raise PinsError(f"{path} is no uv.lock, poetry.lock, pylock.toml or pyproject.toml: it has none of their tables")


def _text(file: Path, limit: int) -> str:
    try:
        if not file.is_file():
            raise InputError(f"{file} is {'no regular file' if file.exists() else 'not there'}")
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read: {error}") from error
    return inputs.text(str(file), limit)


# ------------------------------------------------------------------------------------------ requirements


class _Requirements:
    """pip's format: a requirement a line, and files that it names, each of which is read once."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._left = _LARGEST

    def include(self, file: Path, depth: int = 0) -> Iterator[Pin]:
        """A file."""
        real = os.path.realpath(file)
        if real in self._seen:
            return
        if depth > _DEEPEST:
            raise InputError(f"{file} is named by a chain of more than {_DEEPEST} files")
        self._seen.add(real)
        text = _text(file, self._left)
        self._left -= len(text)
        yield from self.read(text, str(file), file.parent, depth)

    def read(self, text: str, place: str, folder: Path | None, depth: int = 0) -> Iterator[Pin]:
        """The text of one, ``folder`` that which the files that it names are in."""
        for number, line in _logical_lines(text):
            where = f"{place}:{number}"
            if len(line) > _LONGEST:
                raise PinsError(f"{where} has {len(line)} characters, more than a requirement can have ({_LONGEST})")
            option, _, value = (part.strip() for part in line.partition("=" if line.startswith("--") else " "))
            if " " in option:  # --requirement FILE
                option, _, value = (part.strip() for part in line.partition(" "))
            if option in ("-r", "--requirement", "-c", "--constraint") or line[:2] in ("-r", "-c"):
                value = value if option.startswith("--") or len(option) == 2 else line[2:].strip()
                if folder is None or "://" in value or "\0" in value:
                    raise PinsError(f"{where} names {value:.300}, which is not read: give it, too")
                yield from self.include(folder / value, depth + 1)
            elif option in ("-e", "--editable"):
                name = canonicalize_name(value.partition("#egg=")[2].partition("&")[0].partition("[")[0])
                if name:
                    yield Pin(name, None, where, f"editable: {value}")
            elif not line.startswith("-"):
                # What follows a requirement are options of its own, hashes above all.
                yield from _pin(line.partition(" --")[0], where)


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    begun, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        line = "" if line.lstrip().startswith("#") else line.partition(" #")[0]
        first = first or number
        if line.endswith("\\"):
            begun += line[:-1]
            continue
        whole = (begun + line).strip()
        if whole:
            yield first, whole
        begun, first = "", 0
    if begun.strip():
        yield first, begun.strip()


def _pin(text: str, where: str, note: str = "") -> Iterator[Pin]:
    """What one requirement says; paths and URLs without a name say nothing."""
    try:
        requirement = Requirement(text)
        marker = f"where {requirement.marker}" if requirement.marker else ""
    except InvalidRequirement:
        return
    except RecursionError as error:
        raise PinsError(f"{where} is nested too deeply to be read") from error
    note = "; ".join(filter(None, (note, marker)))
    name = canonicalize_name(requirement.name)
    if requirement.url:
        version = _of_wheel(requirement.url)
        yield Pin(name, version, where, "; ".join(filter(None, (f"from {requirement.url}", note))))
        return
    pins = [each.version for each in requirement.specifier if each.operator in ("==", "===")]
    if len(pins) == 1 and not pins[0].endswith(".*"):
        yield Pin(name, pins[0], where, note)
    else:
        range_ = f"{requirement.specifier}" or "any version"
        yield Pin(name, None, where, "; ".join(filter(None, (f"not pinned: {range_}", note))))


def _of_wheel(url: str) -> str | None:
    try:
        return str(parse_wheel_filename(os.path.basename(url.partition("#")[0]))[1])
    except ValueError:  # InvalidWheelFilename, or more digits than Python converts
        return None


# ------------------------------------------------------------------------------------------ TOML


def _locked(packages: Iterable[Mapping[str, Any]], place: str) -> Iterator[Pin]:
    """uv.lock, poetry.lock, pylock.toml: a table for each package, and several of one where markers choose."""
    for package in packages:
        source = package.get("source") or package.get("vcs") or package.get("directory") or {}
        kinds = ("git", "url", "path", "directory", "editable", "virtual")
        of_uv = next((f"{kind} {source[kind]}" for kind in kinds if kind in source), "")
        of_poetry = f"{source['type']} {source.get('url', '')}" if source.get("type") in kinds else ""
        marker = package.get("marker") or package.get("markers") or " or ".join(package.get("resolution-markers", ()))
        origin = (of_uv or of_poetry).strip()
        notes = (f"from {origin}" if origin else "", f"where {marker}" if marker else "")
        version = package.get("version")
        if not isinstance(version, (str, type(None))):
            raise TypeError(f"the version of {package['name']!r:.100} is {version!r:.100}")
        note = "; ".join(filter(None, notes)) or ("" if version else "no version is locked")
        yield Pin(canonicalize_name(package["name"]), version, place, note)


def _project(data: Mapping[str, Any], place: str) -> Iterator[Pin]:
    """pyproject.toml: what the project and its extras and groups ask for."""
    project = data.get("project", {})
    lists = [("", project.get("dependencies", ()))]
    lists += [(f"extra {name}", texts) for name, texts in project.get("optional-dependencies", {}).items()]
    lists += [(f"group {name}", texts) for name, texts in data.get("dependency-groups", {}).items()]
    for note, texts in lists:
        for text in texts:
            if isinstance(text, str):  # another group is a table
                yield from _pin(text, place, note)
    poetry = data.get("tool", {}).get("poetry", {})
    tables = [("", poetry.get("dependencies", {})), ("group dev", poetry.get("dev-dependencies", {}))]
    tables += [(f"group {name}", group.get("dependencies", {})) for name, group in poetry.get("group", {}).items()]
    for note, table in tables:
        for name, wanted in table.items():
            for one in wanted if isinstance(wanted, list) else [wanted]:
                yield _of_poetry(name, one, place, note)


def _of_poetry(name: str, wanted: Any, place: str, note: str) -> Pin:
    """Poetry's own notation: a bare version and ``==`` are pins, the rest (``^``, ``~``) is a range."""
    version = wanted.get("version") if isinstance(wanted, Mapping) else wanted
    text = version if isinstance(version, str) else json.dumps(wanted, default=str)
    bare = text.removeprefix("==").strip()
    pinned = isinstance(version, str) and bare[:1].isdigit() and not any(c in bare for c in "*,<>|~^ ")
    notes = (note, "" if pinned else f"not pinned: {text}")
    return Pin(canonicalize_name(name), bare if pinned else None, place, "; ".join(filter(None, notes)))
