"""Lists with one entry per line: pip's requirements, the output of pip and conda, and the files that these name."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from packaging.utils import canonicalize_name

from . import inputs, names
from .inputs import InputError
from .pins import Entry, Pin, PinsError, Unread, of_conda, of_requirement, shown

LARGEST = 16 * 2**20
"""The most bytes of a file and of all files that it names; the largest lock files have one MiB."""

_LONGEST = 2**18  # characters of a requirement, with its hashes
_DEEPEST = 50  # files that name each other

# Options of requirements files that name no distribution.
_OPTIONS = re.compile(
    r"(-i|-f|--(index-url|extra-index-url|no-index|find-links|no-binary|only-binary|prefer-binary|require-hashes|pre"
    r"|trusted-host|use-feature|no-build-isolation|global-option|config-settings?|use-pep517|process-dependency-links"
    r"|no-deps|no-build|no-emit-\S+|emit-\S+|index-strategy|prerelease|default-index|index))(?=[\s=]|$)|-[if]\S"
)
# The heads of `pip list`, of `conda list` (a comment), and of mamba.
_HEAD = re.compile(r"(?:Package|#?\s*Name)\s+Version(?:\s.*)?")
_RULE = re.compile(r"[-─━\s]+")
_ROW = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*)\s+([A-Za-z0-9][^\s=<>~!]*)(?:\s.*)?", re.ASCII)
_CONDA_EXPORT = re.compile(r"[\w.-]+=[^=\s]+=[^=\s]+")
# Comments for entries that pip could not write as a requirement: in `pip freeze` and conda-lock's explicit files.
_EDITABLE = re.compile(r"# Editable [\w ]{1,80}\((\S+)\)")
_OF_PIP = "# pip "
_MAMBA_TITLE = re.compile(r'List of packages in environment: ".*"')


def text_of(file: Path, limit: int) -> str:
    """The text of a regular file.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        if not file.is_file():
            raise InputError(f"{file} {'is not a regular file' if file.exists() else 'does not exist'}")
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read: {error}") from error
    return inputs.text(str(file), limit)


class Lines:
    """Entries, one per line, and files that lines name; each file is read once."""

    def __init__(self, place: str, folder: Path | None) -> None:
        """Read for the file ``place`` in ``folder``; ``folder`` is None for standard input."""
        self._place = place
        self.folder = folder
        self._left = LARGEST
        self._seen = set() if folder is None else {os.path.realpath(place)}

    def read(self, text: str) -> Iterator[Entry]:
        """Read the text of the file itself."""
        self._left -= len(text)
        yield from self._read(text, self._place, self.folder, 0)

    def include(self, name: str, where: str, folder: Path | None = None, depth: int = 0) -> Iterator[Entry]:
        """Read a file that a line names, in ``folder``, by default the folder of the file itself."""
        folder = folder or self.folder
        if folder is None or "://" in name or "\0" in name:
            yield Unread(where, f"names {name:.300}, which is not read: pass that file, too")
            return
        file = folder / name
        try:
            real = str(file) if str(file) in self._seen else os.path.realpath(file)
            if real in self._seen:
                return
            self._seen |= {str(file), real}
            if depth >= _DEEPEST:
                raise InputError(f"{file} is included through a chain of more than {_DEEPEST} files")
            text = self.text(file)
        except (InputError, OSError, ValueError) as error:
            yield Unread(where, f"names a file: {error}")
            return
        yield from self._read(text, str(file), file.parent, depth + 1)

    def text(self, file: Path) -> str:
        """The text of a file, which counts against the bound of all files.

        Raises:
            InputError: the file cannot be read.
        """
        size = os.stat(file).st_size if file.is_file() else 0
        try:
            return text_of(file, self._left)
        finally:  # unreadable files count as read
            self._left -= min(size, self._left)

    def _read(self, text: str, place: str, folder: Path | None, depth: int) -> Iterator[Entry]:
        table, editable = False, ""
        for number, line in _logical_lines(text, explicit="@EXPLICIT" in text):
            where = f"{place}:{number}"
            if len(line) > _LONGEST:
                raise PinsError(f"{where} has {len(line)} characters; a requirement has at most {_LONGEST}")
            named, editable = editable, ""
            row = _ROW.fullmatch(line) if table else None
            if _HEAD.fullmatch(line):
                table = True
            elif row is not None:
                yield Pin(names.of_conda(row[1]), row[2], where)
            elif _EDITABLE.fullmatch(line):
                editable = line
            elif not (table and _RULE.fullmatch(line)) and line != "@EXPLICIT" and not _MAMBA_TITLE.fullmatch(line):
                yield from self.line(line, where, folder, depth, named)

    def line(
        self, line: str, where: str, folder: Path | None = None, depth: int = 0, editable: str = ""
    ) -> Iterator[Entry]:
        """One requirement, or an option.

        Args:
            line: the line without its comment.
            where: file and line.
            folder: the folder of files that the line names, if not that of the file itself.
            depth: the depth of files that name each other.
            editable: the preceding comment, which names the editable distribution.
        """
        option, value = _option(line)
        if option in ("-r", "--requirement", "-c", "--constraint"):
            yield from self.include(value, where, folder, depth)
        elif option in ("-e", "--editable"):
            yield from _editable(value, where, editable)
        elif _CONDA_EXPORT.fullmatch(line):
            yield of_conda(line, where)
        elif not line.startswith("-"):
            # The options of the requirement follow, mainly hashes.
            yield from of_requirement(line.partition(" --")[0].strip(), where)
        elif not _OPTIONS.match(line):
            yield Unread(where, f"{shown(line)} is not an option of a requirements file")


def _option(line: str) -> tuple[str, str]:
    option, _, value = (part.strip() for part in line.partition("=" if line.startswith("--") else " "))
    if " " in option:  # --requirement FILE
        option, _, value = (part.strip() for part in line.partition(" "))
    if line[:2] in ("-r", "-c", "-e") and len(option) > 2:
        return line[:2], line[2:].strip().removeprefix("=")
    return option, value.strip("\"'")


def _editable(value: str, where: str, comment: str) -> Iterator[Entry]:
    name = canonicalize_name(value.partition("#egg=")[2].partition("&")[0].partition("[")[0])
    match = _EDITABLE.fullmatch(comment)
    if name:
        yield Pin(name, None, where, f"editable: {value}")
    elif match is not None:
        yield from of_requirement(match[1], where, f"editable: {value}")
    elif " @ " in value:
        yield from of_requirement(value, where, "editable")
    else:
        yield Unread(where, f"editable {shown(value)} does not identify a distribution and release")


def _logical_lines(text: str, explicit: bool) -> Iterator[tuple[int, str]]:
    begun, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        line = line.removeprefix(_OF_PIP) if explicit else line
        stripped = line.strip()
        if not stripped and not begun:
            continue
        if not (_HEAD.fullmatch(stripped) or _EDITABLE.fullmatch(stripped)):
            line = "" if stripped.startswith("#") else _without_comment(line)
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


def _without_comment(line: str) -> str:
    """Remove a comment, which begins with blanks and ``#``; the ``#`` of an address follows no blank."""
    comment = re.search(r"\s#", line)
    return line[: comment.start()] if comment else line
