"""Which versions a requirements file, a lock file or an environment names. Nothing is guessed.

Requirements are parsed by packaging, TOML by the standard library (tomli before Python 3.11). Nothing is fetched,
imported or run.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_LARGEST = 64 * 2**20  # bytes; the largest lock files have one


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
    if path == "-":
        return list(_requirements(sys.stdin.read() if sys.stdin else "", "standard input", None, ()))
    file = Path(path)
    text = _text(file)
    if file.suffix not in (".toml", ".lock"):
        return list(_requirements(text, path, file.parent, (file.resolve(),)))
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise PinsError(f"{path} is no TOML: {error}") from error
    try:
        if "package" in data or "packages" in data:  # uv.lock and poetry.lock; pylock.toml
            return list(_locked(data.get("package") or data["packages"], path))
        if "project" in data or "tool" in data or "dependency-groups" in data:
            return list(_project(data, path))
    except (AttributeError, KeyError, TypeError) as error:
        raise PinsError(f"{path} is not as expected of its format: {type(error).__name__}: {error}") from error
    raise PinsError(f"{path} is no uv.lock, poetry.lock, pylock.toml or pyproject.toml: it has none of their tables")


def _text(file: Path) -> str:
    try:
        if not file.is_file():
            raise PinsError(f"{file} is {'no regular file' if file.exists() else 'not there'}")
        if file.stat().st_size > _LARGEST:
            raise PinsError(f"{file} has more than {_LARGEST >> 20} MiB")
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PinsError(f"cannot read {file}: {error}") from error


# ------------------------------------------------------------------------------------------ requirements


def _requirements(text: str, place: str, folder: Path | None, within: tuple[Path, ...]) -> Iterator[Pin]:
    """pip's format: a requirement a line, and files that it names."""
    for number, line in _logical_lines(text):
        where = f"{place}:{number}"
        option, _, value = (part.strip() for part in line.partition("=" if line.startswith("--") else " "))
        if " " in option:  # --requirement FILE
            option, _, value = (part.strip() for part in line.partition(" "))
        if option in ("-r", "--requirement", "-c", "--constraint") or line[:2] in ("-r", "-c"):
            value = value if option.startswith("--") or len(option) == 2 else line[2:].strip()
            if folder is None or "://" in value:
                raise PinsError(f"{where} names {value}, which is not read: give it, too")
            file = folder / value
            if file.resolve() not in within:
                yield from _requirements(_text(file), str(file), file.parent, (*within, file.resolve()))
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
    except InvalidRequirement:
        return
    marker = f"where {requirement.marker}" if requirement.marker else ""
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
    except InvalidWheelFilename:
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
