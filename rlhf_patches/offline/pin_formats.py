"""Lock files and lists with a structure: TOML, JSON, and as much of YAML as conda's files have. Nothing is run."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from packaging.utils import canonicalize_name

from .pin_lines import Lines
from .pins import Entry, Pin, PinsError, Unread, notes, of_conda, of_requirement, shown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Keys of more parts take tomllib the square of them, each time that they occur.
_DEEP_KEY = re.compile(r"""(?<![\w."'-])(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){32}""", re.ASCII)
_SOURCES = ("git", "url", "path", "directory", "editable", "virtual", "file")
_WRONG = (AttributeError, KeyError, TypeError, ValueError, RecursionError)


def _as_expected(entries: Iterator[Entry], place: str) -> Iterator[Entry]:
    try:
        yield from entries
    except _WRONG as error:
        raise PinsError(f"{place} is not as expected of its format: {type(error).__name__}: {error}") from error


# ------------------------------------------------------------------------------------------ TOML


def of_toml(text: str, place: str) -> Iterator[Entry]:
    """uv.lock, poetry.lock, pdm.lock, pylock.toml and pyproject.toml.

    Raises:
        PinsError: it is none of them.
    """
    if _DEEP_KEY.search(text):
        raise PinsError(f"{place} has a key of more than 32 parts, which no lock file has")
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # more digits than Python converts; nested too deeply
        raise PinsError(f"{place} is no TOML: {error}") from error
    if "package" in data or "packages" in data:
        yield from _as_expected(_locked(data.get("package") or data.get("packages", ()), place), place)
    elif "project" in data or "tool" in data or "dependency-groups" in data:
        yield from _as_expected(_project(data, place), place)
    else:
        raise PinsError(
            f"{place} is no uv.lock, poetry.lock, pdm.lock, pylock.toml or pyproject.toml: it has none of their tables"
        )


def _locked(packages: Iterable[Mapping[str, Any]], place: str) -> Iterator[Entry]:
    """A table for each package, and several of one where markers choose."""
    for package in packages:
        source = package.get("source") or package.get("vcs") or package.get("directory") or {}
        of_uv = next((f"{kind} {source[kind]}" for kind in _SOURCES if kind in source), "")
        of_poetry = f"{source['type']} {source.get('url', '')}" if source.get("type") in _SOURCES else ""
        of_pdm = next((f"{kind} {package[kind]}" for kind in ("git", "url", "path") if kind in package), "")
        marker = package.get("marker") or package.get("markers") or " or ".join(package.get("resolution-markers", ()))
        origin = (of_uv or of_poetry or of_pdm).strip()
        version = package.get("version")
        if not isinstance(version, (str, type(None))):
            raise TypeError(f"the version of {package['name']!r:.100} is {version!r:.100}")
        note = notes(f"from {origin}" if origin else "", f"where {marker}" if marker else "")
        yield Pin(
            canonicalize_name(package["name"]), version, place, note or ("" if version else "no version is locked")
        )


def _project(data: Mapping[str, Any], place: str) -> Iterator[Entry]:
    """pyproject.toml: what the project and its extras and groups ask for."""
    project = data.get("project", {})
    lists = [("", project.get("dependencies", ()))]
    lists += [(f"extra {name}", texts) for name, texts in project.get("optional-dependencies", {}).items()]
    lists += [(f"group {name}", texts) for name, texts in data.get("dependency-groups", {}).items()]
    for note, texts in lists:
        for text in texts:
            if isinstance(text, str):  # another group is a table
                yield from of_requirement(text, place, note)
    tools = data.get("tool", {})
    poetry = tools.get("poetry", {})
    tables = [("", poetry.get("dependencies", {})), ("group dev", poetry.get("dev-dependencies", {}))]
    tables += [(f"group {name}", group.get("dependencies", {})) for name, group in poetry.get("group", {}).items()]
    for note, table in tables:
        for name, wanted in table.items():
            for one in wanted if isinstance(wanted, list) else [wanted]:
                yield _of_poetry(name, one, place, note)
    for name, table in tools.items():
        if name != "poetry":
            yield from _of_tool(table, place, f"tool.{name}")
    requires = data.get("build-system", {}).get("requires")
    if requires:
        yield Unread(place, "build-system.requires is not read", mention=json.dumps(requires, default=str))


def _of_tool(table: Any, place: str, where: str) -> Iterator[Entry]:
    """What other tools' tables name: uv's, PDM's, hatch's and pixi's ``...dependencies`` are only searched."""
    for key, value in table.items() if isinstance(table, Mapping) else ():
        if "dependenc" in key or key == "sources":
            text = json.dumps(value, default=str)
            yield Unread(place, f"{where}.{key} is not read: {shown(text)}", mention=text)
        else:
            yield from _of_tool(value, place, f"{where}.{key:.50}")


def _of_poetry(name: str, wanted: Any, place: str, note: str) -> Pin:
    """Poetry's own notation: a bare version and ``==`` are pins, the rest (``^``, ``~``) is a range."""
    version = wanted.get("version") if isinstance(wanted, Mapping) else wanted
    text = version if isinstance(version, str) else json.dumps(wanted, default=str)
    bare = text.removeprefix("==").strip()
    pinned = isinstance(version, str) and bare[:1].isdigit() and not any(c in bare for c in "*,<>|~^ ")
    return Pin(
        canonicalize_name(name), bare if pinned else None, place, notes(note, "" if pinned else f"not pinned: {text}")
    )


# ------------------------------------------------------------------------------------------ JSON


def of_json(text: str, place: str) -> Iterator[Entry]:
    """Pipfile.lock, and what `pip list --format json`, `uv pip list` and `conda list --json` print.

    Raises:
        PinsError: it is none of them.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PinsError(f"{place} is no JSON: {error}") from error
    if isinstance(data, list):
        yield from _listed(data, place)
    elif isinstance(data, dict) and "_meta" in data:
        yield from _as_expected(_of_pipfile(data, place), place)
    else:
        raise PinsError(f"{place} is no Pipfile.lock, and no list that `pip list` or `conda list` prints as JSON")


def _listed(data: list[Any], place: str) -> Iterator[Entry]:
    for number, item in enumerate(data, 1):
        name, version = (item.get("name"), item.get("version")) if isinstance(item, dict) else (None, None)
        if isinstance(name, str) and isinstance(version, str):
            yield Pin(canonicalize_name(name), version, place)
        else:
            yield Unread(f"{place}, entry {number}", "no object with a name and a version")


def _of_pipfile(data: Mapping[str, Any], place: str) -> Iterator[Entry]:
    for category, table in data.items():
        for name, entry in table.items() if category != "_meta" else ():
            version = entry.get("version")
            origin = next((f"from {kind} {entry[kind]}" for kind in _SOURCES if kind in entry), "")
            note = notes(origin, f"where {entry['markers']}" if entry.get("markers") else "")
            group = "" if category == "default" else f"group {category}"
            if isinstance(version, str):
                yield _of_poetry(name, version, place, notes(group, note))
            else:
                yield Pin(canonicalize_name(name), None, place, notes(note or "no version is locked", group))


# ------------------------------------------------------------------------------------------ YAML

_KEY = re.compile(r"""(["']?)([A-Za-z_][\w-]*)\1\s*:(?:\s+(.*))?""", re.ASCII)
_ITEM = re.compile(r"( *)- +(.*)")
_FIELD = re.compile(r"( *)(?:- +)?(name|version|platform|manager): +(\S.*)")
# environment.yml, and conda-lock.yml.
_OTHER_KEYS = re.compile(r"name|channels|prefix|variables|platforms?|category|version|metadata|pip-repositories")


def of_yaml(text: str, place: str, lines: Lines) -> Iterator[Entry]:
    """conda's environment.yml and conda-lock.yml, line by line: what is written in another way is said.

    Raises:
        PinsError: it is none of them.
    """
    sections = list(_sections(text, place))
    if not any(name in ("dependencies", "package") for name, _ in sections):
        raise PinsError(f"{place} is no environment.yml or conda-lock.yml: it has no list `dependencies` or `package`")
    for name, rows in sections:
        if name == "dependencies":
            yield from _dependencies(rows, place, lines)
        elif name == "package":
            yield from _packages(rows, place)
        elif not _OTHER_KEYS.fullmatch(name):
            number, line = rows[0]
            yield Unread(f"{place}:{number}", f"{shown(line)} is not what conda's files have")


_Rows = list[tuple[int, str]]


def _sections(text: str, place: str) -> Iterator[tuple[str, _Rows]]:
    """The keys that begin a line, each with its own line first and those that follow, without comments."""
    name, rows = "", []
    for number, line in enumerate(text.splitlines(), 1):
        line = re.split(r"(?:^|\s)#", line, maxsplit=1)[0].rstrip()
        if not line or line in ("---", "..."):
            continue
        if line[0] in " \t-" and name:
            rows.append((number, line))
            continue
        if name:
            yield name, rows
        key = _KEY.fullmatch(line)
        name, rows = key[2] if key else line, [(number, line)]
    if name:
        yield name, rows


def _dependencies(rows: _Rows, place: str, lines: Lines) -> Iterator[Entry]:
    """The items of the list; below ``- pip:`` those that are indented more are requirements."""
    first, of_pip = None, False
    if not rows[0][1].endswith(":"):
        yield Unread(f"{place}:{rows[0][0]}", f"{shown(rows[0][1])} is no list with an item a line")
    for number, line in rows[1:]:
        where = f"{place}:{number}"
        item = _ITEM.fullmatch(line)
        if item is None:
            yield Unread(where, f"{shown(line.strip())} is no item of the list")
            continue
        indent = len(item[1])
        first = indent if first is None else first
        value = _scalar(item[2])
        if value is None or (indent != first and not (of_pip and indent > first)):
            yield Unread(where, f"{shown(item[2])} is not read: expected a name with a version, one a line")
        elif indent > first:
            yield from lines.line(value, where)
        elif value in ("pip:", "pip :"):
            of_pip = True
        else:
            of_pip = False
            yield of_conda(value, where)


def _packages(rows: _Rows, place: str) -> Iterator[Entry]:
    """A lock file's packages: the keys of each at the indent of its first."""
    indent, begins, package = -1, rows[0][0], dict[str, str]()
    for number, line in rows[1:]:
        item = _ITEM.fullmatch(line)
        if item is not None and (indent < 0 or len(item[1]) == indent):
            if indent >= 0:
                yield _of_conda_lock(package, f"{place}:{begins}")
            indent, begins, package = len(item[1]), number, {}
        field = _FIELD.fullmatch(line)
        depth = len(line) - len(line.lstrip(" -"))
        if field is not None and depth == indent + 2:
            package[field[2]] = _scalar(field[3]) or ""
        elif item is None and depth <= indent:
            yield Unread(f"{place}:{number}", f"{shown(line.strip())} is not what conda-lock writes")
    yield _of_conda_lock(package, f"{place}:{begins}")


def _of_conda_lock(package: Mapping[str, str], where: str) -> Entry:
    name, version = package.get("name"), package.get("version")
    if not name or not version:
        return Unread(where, "no package with a name and a version in a line each")
    platform = package.get("platform")
    return Pin(canonicalize_name(name), version, where, f"on {platform}" if platform else "")


def _scalar(text: str) -> str | None:
    """A plain or quoted word of YAML; None where it is anything else."""
    if text[:1] in "\"'":
        inner = text[1:-1]
        return inner if len(text) > 1 and text[-1] == text[0] and text[0] not in inner and "\\" not in inner else None
    return None if text[:1] in "[]{}>|*&!%@`?," or ": " in text else text
