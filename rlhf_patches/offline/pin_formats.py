"""Lock files and lists in TOML, JSON and YAML."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import yaml
from packaging.utils import canonicalize_name

from . import names, yaml_nodes
from .pin_lines import Lines
from .pins import Entry, Pin, PinsError, Unread, notes, of_conda, of_requirement, shown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# For keys of more parts tomllib takes quadratic time, at each occurrence.
_DEEP_KEY = re.compile(r"""(?<![\w."'-])(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){32}""", re.ASCII)
_SOURCES = ("git", "url", "path", "directory", "editable", "virtual", "file")
_WRONG = (AttributeError, KeyError, TypeError, ValueError, RecursionError)


def _as_expected(entries: Iterator[Entry], place: str) -> Iterator[Entry]:
    try:
        yield from entries
    except _WRONG as error:
        raise PinsError(f"{place} does not have the expected form: {type(error).__name__}: {error}") from error


# ------------------------------------------------------------------------------------------ TOML


def of_toml(text: str, place: str) -> Iterator[Entry]:
    """uv.lock, poetry.lock, pdm.lock, pylock.toml and pyproject.toml.

    Raises:
        PinsError: the text is none of these.
    """
    if _DEEP_KEY.search(text):
        raise PinsError(f"{place} has a key of more than 32 parts, the limit for a lock file")
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # more digits than Python converts; nested too deeply
        raise PinsError(f"{place} is not valid TOML: {error}") from error
    if "package" in data or "packages" in data:
        yield from _as_expected(_locked(data.get("package") or data.get("packages", ()), place), place)
    elif "project" in data or "tool" in data or "dependency-groups" in data:
        yield from _as_expected(_project(data, place), place)
    else:
        raise PinsError(
            f"{place} is not a uv.lock, poetry.lock, pdm.lock, pylock.toml or pyproject.toml: it has none of their "
            "tables"
        )


def _locked(packages: Iterable[Mapping[str, Any]], place: str) -> Iterator[Entry]:
    """Read a table for each package; packages selected by markers have several."""
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
    """Read pyproject.toml: the requirements of the project, its extras and groups."""
    project = data.get("project", {})
    lists = [("", project.get("dependencies", ()))]
    lists += [(f"extra {name}", texts) for name, texts in project.get("optional-dependencies", {}).items()]
    lists += [(f"group {name}", texts) for name, texts in data.get("dependency-groups", {}).items()]
    of_uv = data.get("tool", {}).get("uv", {})
    lists += [(kind, of_uv.get(f"{kind}-dependencies", ())) for kind in ("override", "constraint", "dev")]
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
    """Search other tools' tables: ``...dependencies`` of uv, PDM, hatch and pixi are not parsed."""
    for key, value in table.items() if isinstance(table, Mapping) else ():
        if where == "tool.uv" and key in ("override-dependencies", "constraint-dependencies", "dev-dependencies"):
            continue
        if "dependenc" in key or key == "sources":
            text = json.dumps(value, default=str)
            yield Unread(place, f"{where}.{key} is not read: {shown(text)}", mention=text)
        else:
            yield from _of_tool(value, place, f"{where}.{key:.50}")


def _of_poetry(name: str, wanted: Any, place: str, note: str) -> Pin:
    """Parse Poetry's notation: a bare version and ``==`` are pins, others (``^``, ``~``) are ranges."""
    version = wanted.get("version") if isinstance(wanted, Mapping) else wanted
    text = version if isinstance(version, str) else json.dumps(wanted, default=str)
    bare = text.removeprefix("==").strip()
    pinned = isinstance(version, str) and bare[:1].isdigit() and not any(c in bare for c in "*,<>|~^ ")
    return Pin(
        canonicalize_name(name), bare if pinned else None, place, notes(note, "" if pinned else f"not pinned: {text}")
    )


# ------------------------------------------------------------------------------------------ JSON


def of_json(text: str, place: str) -> Iterator[Entry]:
    """Read Pipfile.lock, and the output of `pip list --format json`, `uv pip list` and `conda list --json`.

    Raises:
        PinsError: the text is none of these.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PinsError(f"{place} is not valid JSON: {error}") from error
    if isinstance(data, list):
        yield from _listed(data, place)
    elif isinstance(data, dict) and "_meta" in data:
        yield from _as_expected(_of_pipfile(data, place), place)
    else:
        raise PinsError(f"{place} is neither a Pipfile.lock nor a list that `pip list` or `conda list` prints as JSON")


def _listed(data: list[Any], place: str) -> Iterator[Entry]:
    for number, item in enumerate(data, 1):
        name, version = (item.get("name"), item.get("version")) if isinstance(item, dict) else (None, None)
        if isinstance(name, str) and isinstance(version, str):
            yield Pin(names.of_conda(name), version, place)
        else:
            yield Unread(f"{place}, entry {number}", "not an object with a name and a version")


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

# environment.yml, and conda-lock.yml.
_OTHER_KEYS = re.compile(r"name|channels|prefix|variables|platforms?|category|version|metadata|pip-repositories")


def of_yaml(text: str, place: str, lines: Lines) -> Iterator[Entry]:
    """Read conda's environment.yml and conda-lock.yml; other contents give an `Unread`.

    Raises:
        PinsError: the text is neither of them.
    """
    try:
        root = yaml_nodes.compose(text, place)
    except yaml_nodes.NotYaml as error:
        raise PinsError(str(error)) from error
    sections = root.value if isinstance(root, yaml.MappingNode) else []
    if not any(key.value in ("dependencies", "package") for key, _ in sections):
        raise PinsError(f"{place} is neither environment.yml nor conda-lock.yml: it has no `dependencies` or `package`")
    for key, value in sections:
        if key.value == "dependencies":
            yield from _dependencies(value, place, lines)
        elif key.value == "package":
            yield from _packages(value, place)
        elif not isinstance(key.value, str) or not _OTHER_KEYS.fullmatch(key.value):
            yield Unread(yaml_nodes.at(place, key), f"{shown(str(key.value))} is not a key of conda's files")


def _dependencies(section: yaml.Node, place: str, lines: Lines) -> Iterator[Entry]:
    """Read conda's specifications, and pip's requirements below ``pip``."""
    for item in _items(section):
        if _is_text(item):
            yield of_conda(item.value, yaml_nodes.at(place, item))
            continue
        for key, value in item.value if isinstance(item, yaml.MappingNode) else [(item, item)]:
            if key.value != "pip" or not isinstance(value, yaml.SequenceNode):
                yield Unread(yaml_nodes.at(place, key), "expected a name with a version, or the list `pip`")
                continue
            for requirement in value.value:
                if _is_text(requirement):
                    yield from lines.line(requirement.value, yaml_nodes.at(place, requirement))
                else:
                    yield Unread(yaml_nodes.at(place, requirement), "expected a pip requirement")


def _packages(section: yaml.Node, place: str) -> Iterator[Entry]:
    """Read a lock file's packages."""
    for item in _items(section):
        fields = item.value if isinstance(item, yaml.MappingNode) else []
        package = {key.value: value.value for key, value in fields if _is_text(key) and _is_text(value)}
        yield _of_conda_lock(package, yaml_nodes.at(place, item))


def _items(section: yaml.Node) -> list[yaml.Node]:
    """The items of a list; another node is one item, which is reported."""
    return list(section.value) if isinstance(section, yaml.SequenceNode) else [section]


def _is_text(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and bool(node.value)


def _of_conda_lock(package: Mapping[str, str], where: str) -> Entry:
    name, version = package.get("name"), package.get("version")
    if not name or not version:
        return Unread(where, "not a package with a name and a version")
    platform = package.get("platform")
    return Pin(names.of_conda(name), version, where, f"on {platform}" if platform else "")
