"""The distributions that a Dockerfile installs, and those of its base images; other instructions are only searched."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from . import base_images, inputs, shell
from .pin_lines import Lines
from .pin_shell import Reader
from .pins import Entry, PinsError, Unread, shown
from .shell import Word

_LARGEST = 2**18  # characters; the largest Dockerfiles have some tens of thousands
_COMMENT = re.compile(r"\s*#")
_HEREDOC = re.compile(r"""<<-?\s*["']?(\w+)["']?""")
_INSTRUCTION = re.compile(
    r"\s*(?:ONBUILD\s+)?(RUN|FROM|COPY|ADD|ARG|ENV|WORKDIR|SHELL)\s+(.*)", re.IGNORECASE | re.DOTALL
)
_FROM = re.compile(r"FROM(\s+--platform=\S+)?\s+\S+(\s+(AS|as)\s+\S+)?")
_BOUND = re.compile(r"--mount=type=bind,(?:\S*,)?(?:source|src)=([^,\s]+),(?:target|dst|destination)=([^,\s]+)")
# Variables that choose where a command installs.
_PLACES = re.compile(r"\b(?:PATH|VIRTUAL_ENV|CONDA_\w+|PIP_\w+|UV_\w+|PYTHONUSERBASE)[\s=]")
_OPTIONS = re.compile(r"(?:--[a-z-]+(?:=\S+)?(?:\s|\\\n)+)*")


def read(text: str, place: str, lines: Lines, folder: Path | None) -> Iterator[Entry]:
    """Read a Dockerfile's text; ``folder`` has the files that it copies, if it is known.

    Raises:
        PinsError: the text is too long.
    """
    if len(text) > _LARGEST:
        raise PinsError(f"{place} has more than 256 KiB, the limit for a Dockerfile")
    dockerfile = _Dockerfile(place, lines, folder)
    try:
        entries = [*dockerfile.read(text)]
    except shell.ShellError as error:
        raise PinsError(f"{place} {error}") from error
    yield from (entry for entry in entries if not dockerfile.is_replaced(entry))


class _Dockerfile:
    def __init__(self, place: str, lines: Lines, folder: Path | None) -> None:
        self._place, self._folder = place, folder
        self._reader = Reader(place, lines, self._find)
        self._global: dict[str, str] = {}
        self._values: dict[str, str] = {}
        self._stages: dict[str, dict[str, str]] = {}
        self._copied: list[tuple[str, str]] = []
        self._workdir = "/"
        self._from_lines = 0

    def is_replaced(self, entry: Entry) -> bool:
        """Whether a later command of its stage replaces a pin; a file may be installed in several stages."""
        once = self._from_lines == 1 or entry.place.startswith(f"{self._place}:")
        return once and entry in self._reader.replaced

    def read(self, text: str) -> Iterator[Entry]:
        self._values = self._global  # ARG before the first FROM
        for number, instruction, rest in _instructions(text):
            where = f"{self._place}:{number}"
            if instruction == "RUN":
                self._copied += [(source, self._absolute(target)) for source, target in _BOUND.findall(rest)]
                yield from self._run(_OPTIONS.sub("", rest, count=1), number - 1)
            elif instruction == "FROM":
                self._from_lines += 1
                self._reader.in_another_environment()
                yield from self._from(rest, where)
            elif instruction in ("ARG", "ENV"):
                self._set(instruction, rest)
            elif instruction == "SHELL":  # such as `conda run`
                self._reader.in_another_environment()
            elif instruction == "WORKDIR":
                self._workdir = self._absolute(rest.strip())
            else:
                self._copied += [(source, self._absolute(target)) for source, target in _copied(rest)]
                yield Unread(where, f"{instruction} {shown(rest)} is not read", mention=rest)

    def _run(self, command: str, before: int) -> Iterator[Entry]:
        if command.lstrip().startswith("["):
            try:
                words = [Word(str(word), 1) for word in json.loads(command)]
            except (ValueError, TypeError, RecursionError):
                pass
            else:
                where = f"{self._place}:{before + 1}"
                yield from self._reader.command(words, where, self._place, before) if words else ()
                return
        yield from self._reader.read(command, before, self._values)

    def _from(self, rest: str, where: str) -> Iterator[Entry]:
        image, _, name = (part.strip() for part in re.sub(r"--platform=\S+", "", rest).partition(" "))
        words = shell.read(f"x {image}", values=self._global).commands
        image = words[0].words[1].text if words and len(words[0].words) == 2 else image
        stage = self._stages.get(image.lower())
        self._values = dict(stage or {})
        self._stages[name[3:].strip().lower()] = self._values
        if stage is None:
            yield from base_images.read(image, rest, where)

    def _set(self, instruction: str, rest: str) -> None:
        """Set the values of ``ARG A=1``, ``ARG A``, ``ENV A=1 B=2`` and ``ENV A 1``."""
        if _PLACES.search(rest):
            self._reader.in_another_environment()
        old = re.fullmatch(r"(\w+)\s+([^=]+)", rest.strip()) if instruction == "ENV" else None
        pairs = f'{old[1]}="{old[2]}"' if old else rest
        commands = shell.read(f"x {pairs}", values=self._values).commands
        for word in commands[0].words[1:] if commands else ():
            key, sign, value = word.text.partition("=")
            if sign and word.known:
                self._values[key] = value
            elif not sign and key in self._global:
                self._values[key] = self._global[key]
            else:
                self._values.pop(key, None)

    def _absolute(self, path: str) -> str:
        return os.path.join(self._workdir, path)

    def _find(self, name: str) -> Path | None:
        """The file beside the Dockerfile that an instruction copies to this place of the image."""
        if "://" in name:
            return None
        wanted = os.path.normpath(self._absolute(name))
        for source, target in self._copied:
            place = os.path.normpath(target)
            within = os.path.join(place, "")
            paths = [source] if wanted in (place, os.path.join(place, os.path.basename(source))) else []
            paths += [os.path.join(source, wanted.removeprefix(within))] if wanted.startswith(within) else []
            for path in paths:
                file = inputs.beside(self._folder, path.lstrip("/"))
                if file is not None:
                    return file
        return None


def _copied(rest: str) -> Iterator[tuple[str, str]]:
    """The sources of COPY and ADD, each with the target; not those of another image."""
    words = [word for word in rest.split() if word != "\\"]
    if not any(word.startswith("--from") for word in words):
        names = [word for word in words if not word.startswith("--")]
        yield from ((source, names[-1]) for source in names[:-1])


def is_one(text: str) -> bool:
    """Whether the text begins like a Dockerfile."""
    for line in text[:10_000].splitlines():
        if line.strip() and not _COMMENT.match(line) and not line.startswith("ARG "):
            return _FROM.fullmatch(line.rstrip()) is not None
    return False


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """Instructions with their first line, in their own lines; a here-document's lines are one RUN."""
    begun, first, end, document = "", 0, None, list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        if end is not None:
            if line.strip() == end:
                yield first, "RUN", "\n".join(document)
                end = None
            else:
                document.append(line)
            continue
        if _COMMENT.match(line):  # Docker removes comments from continued lines, too
            begun += "\\\n" if begun else ""
            continue
        first = first if begun else number
        if line.rstrip().endswith("\\"):
            begun += line.rstrip() + "\n"
            continue
        whole, begun = begun + line, ""
        read = _INSTRUCTION.fullmatch(whole)
        if read is None:
            continue
        heredoc = _HEREDOC.search(read[2]) if read[1].upper() in ("RUN", "COPY", "ADD") else None
        if heredoc is not None and _HEREDOC.sub("", _OPTIONS.sub("", read[2], count=1)).strip() == "":
            end, first, document = heredoc[1], number + 1, []
            continue
        if heredoc is not None:  # a file's contents, or another program's
            end, document, first = heredoc[1], [], number + 1
        later = [(first, "SHELL", "")] if whole.lstrip()[:7].upper() == "ONBUILD" else []  # in another build
        yield from later
        yield first if heredoc is None else number, read[1].upper(), _HEREDOC.sub("", read[2]) if heredoc else read[2]
        yield from later
    read = _INSTRUCTION.fullmatch(begun) if begun else None
    if read is not None:
        yield first, read[1].upper(), read[2]
    if end is not None:
        yield first, "RUN", "\n".join(document)
