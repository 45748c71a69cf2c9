"""The releases that a file, standard input or this environment names; the file's name may give its format.

packaging parses requirements, the standard library TOML and JSON. Nothing is fetched, imported or run.

Files may be malicious: the size of each file is limited, and so is the total of files that name others.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

from . import inputs, pin_dockerfile, pin_formats, pin_setup, pin_shell
from .inputs import InputError
from .pin_lines import LARGEST, Lines, text_of
from .pins import COMMAND_LINE, EXPECTED, Entry, Pin, PinsError, Unread, of_requirement

_MOST = 20_000  # pins of one file, and unparsed entries; the largest lock files have some thousands
_TOML = re.compile(r"\[{1,2}(project|package|packages|build-system|dependency-groups|tool|metadata)[\].]")
_LOCK_TOML = re.compile(r"(lock-version|version|revision|requires-python) = ")
_REQUIREMENT = re.compile(r"[A-Za-z0-9][\w.-]*(?:\[[\w,.-]*\])?\s*[=<>~!]=[^/\\]+")
_YAML = re.compile(r"(dependencies|package|channels):")


@dataclass(frozen=True)
class Reading:
    """The pins of a place, and the entries that do not identify a release."""

    pins: tuple[Pin, ...]
    unread: tuple[Unread, ...]


def installed() -> Reading:
    """The installed distributions, in the order of Python's search path."""
    return _reading(_installed(), "this environment")


def _installed() -> Iterator[Entry]:
    seen = set()
    for distribution in importlib.metadata.distributions():
        try:
            name, version = distribution.metadata["Name"], distribution.metadata["Version"]
            direct = json.loads(distribution.read_text("direct_url.json") or "{}")
        except Exception:  # half removed, or damaged
            name, version, direct = None, None, {}
        if not name:
            folder = os.path.basename(getattr(distribution, "_path", ""))
            yield Unread("this environment", f"the metadata in {folder} cannot be read", mention=folder)
        elif (name := canonicalize_name(name)) not in seen:
            seen.add(name)
            note = f"from {direct['url']}" if isinstance(direct, dict) and direct.get("url") else ""
            note = note if version else "its metadata state no version"
            yield Pin(name, version, "this environment", note)


def read(path: str) -> Reading:
    """The releases that a file names; ``-`` is standard input.

    Raises:
        PinsError: the file cannot be read, has none of the formats, or names no release.
    """
    what = "standard input" if path == "-" else path
    try:
        reading = _reading(_of_file(path, what), what)
    except InputError as error:
        raise PinsError(str(error)) from error
    if reading.pins:
        return reading
    first = next((f"; {place}: {why}" for place, why, _ in reading.unread), "")
    more = f", and {len(reading.unread) - 1} more" if len(reading.unread) > 1 else ""
    raise PinsError(f"{what} names no release: {EXPECTED}{first}{more}")


def _reading(entries: Iterable[Entry], place: str) -> Reading:
    pins: dict[tuple[str, str | None, str, str], Pin] = {}
    unread = []
    for entry in entries:
        if isinstance(entry, Pin):
            # Keep the first of equal lines.
            pins.setdefault((entry.name, entry.version, entry.note, entry.place.rpartition(":")[0]), entry)
        else:
            unread.append(entry)
        if max(len(pins), len(unread)) > _MOST:
            what = "releases" if len(pins) > _MOST else "entries that are not understood"
            raise PinsError(f"{place} has more than {_MOST} {what}: expected a requirements or a lock file")
    return Reading(tuple(pins.values()), tuple(unread))


def _of_file(path: str, what: str) -> Iterator[Entry]:
    if _REQUIREMENT.fullmatch(path) and not os.path.lexists(path):
        return of_requirement(path, COMMAND_LINE)
    folder = None if path == "-" else Path(path).parent
    lines = Lines(what, folder)
    text = inputs.text("-", LARGEST) if path == "-" else text_of(Path(path), LARGEST)
    kind = _by_name(path) or _by_content(text)
    if kind == "toml":
        return pin_formats.of_toml(text, what)
    if kind == "json":
        return pin_formats.of_json(text, what)
    if kind == "yaml":
        return pin_formats.of_yaml(text, what, lines)
    if kind == "dockerfile":
        return pin_dockerfile.read(text, what, lines, folder)
    if kind == "shell":
        return pin_shell.Reader(what, lines, lambda name: inputs.beside(folder, name)).read(text)
    if kind in ("setup.py", "setup.cfg"):
        return pin_setup.read(text, what, is_python=kind == "setup.py")
    return lines.read(text)


def _by_name(path: str) -> str | None:
    name = os.path.basename(path).lower()
    for kind, ends in (("toml", ".toml"), ("json", ".json"), ("yaml", (".yml", ".yaml"))):
        if name.endswith(ends):
            return kind
    if name in ("setup.py", "setup.cfg"):
        return name
    if name.endswith((".sh", ".bash")):
        return "shell"
    if name in ("uv.lock", "poetry.lock", "pdm.lock"):  # other lock files have requirements, or conda-lock's output
        return "toml"
    if name.partition(".")[0] in ("dockerfile", "containerfile") or name.endswith((".dockerfile", ".containerfile")):
        return "dockerfile"
    return None


def _by_content(text: str) -> str | None:
    if text.lstrip()[:1] == "{" or re.match(r"\s*\[\s*[\]{]", text):
        return "json"
    if pin_dockerfile.is_one(text):
        return "dockerfile"
    if pin_shell.is_one(text):
        return "shell"
    lines = text[:100_000].splitlines()
    if any(_TOML.match(line) for line in lines) or (lines and _LOCK_TOML.match(lines[0])):
        return "toml"
    return "yaml" if any(_YAML.match(line) for line in lines) else None
