"""The distributions that shell commands install: ``pip install``, ``uv pip install``, ``conda install``.

Other commands are only searched. Scripts that a script runs are read if they are there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from . import shell
from .pin_lines import Lines
from .pins import Entry, Pin, PinsError, Unread, of_conda, shown
from .shell import Word

_PIP = re.compile(r"pip[\d.]*(?:\.exe)?")
_CONDA = re.compile(r"conda|mamba|micromamba")
# Commands of other tools that install from a file.
_OF_A_FILE = re.compile(
    r"\b(?:(?:uv|pip|pdm|pipenv|pixi|rye) sync|(?:poetry|pdm|pipenv|pixi) install"
    r"|(?:conda|mamba) env (?:create|update))\b"
)
_NAMING = {"-r": "-r", "--requirement": "-r", "-c": "-c", "--constraint": "-c", "-e": "-e", "--editable": "-e"}
_NAMING |= {"--requirements": "-r", "--constraints": "-c"}  # uv's
# Options with a value, which is not an installed distribution. A missing option causes one more reported line.
_WITH_VALUE = re.compile(
    r"-[iftpCb]|--(index-url|extra-index-url|index|default-index|find-links|target|prefix|root|python|platform"
    r"|python-version|python-platform|abi|implementation|no-binary|only-binary|trusted-host|timeout|retries|cache-dir"
    r"|progress-bar|upgrade-strategy|torch-backend|index-strategy|prerelease|resolution|config-settings?"
    r"|global-option|install-option|src|log|proxy|cert|client-cert|use-feature|link-mode|exclude-newer|report"
    r"|no-build-isolation-package|build-constraints?|keyring-provider|root-user-action)"
)
_CONDAS_WITH_VALUE = re.compile(r"-[cnp]|--(channel|name|prefix|solver|platform|repodata-fn)")
_ELSEWHERE = re.compile(r"-t|--(?:target|prefix|root|python|dry-run|constraints?)(?:=.*)?|-[cp].*")
_OTHER_ENVIRONMENT = re.compile(r"activate|venv|conda|mamba|pyenv|chroot")
_DEEPEST = 8  # scripts that run each other


class Reader:
    """Reads scripts and single commands, and the scripts that they run.

    Attributes:
        replaced: pins in whose place a later command certainly installs another release.
    """

    def __init__(self, place: str, lines: Lines, find: Callable[[str], Path | None]) -> None:
        """Read for the file ``place``; ``find`` returns the file that a command names, None if it is not there."""
        self._place, self._lines, self._find = place, lines, find
        self._seen = set[str]()
        self._depth = 0
        self.replaced = set[Pin]()
        self._installed: dict[tuple[str, str], set[Pin]] = {}
        self._moved = ""  # by `cd`

    def read(
        self, text: str, first: int = 0, values: Mapping[str, str] | None = None, place: str = ""
    ) -> Iterator[Entry]:
        """The entries of a script whose first line has the number ``first + 1``.

        Raises:
            PinsError: the script is too large or is nested too deeply.
        """
        place = place or self._place
        self._moved = "" if self._depth == 0 else self._moved
        try:
            script = shell.read(text, values=values)
        except shell.ShellError as error:
            raise PinsError(f"{place} {error}") from error
        for line in script.not_understood[:1]:
            yield Unread(f"{place}:{first + line}", f"{shown(text)} is not a shell command", mention=text)
        for command in script.commands:
            yield from self.command(command.words, f"{place}:{first + command.line}", place, first, command.sure)

    def in_another_environment(self) -> None:
        """What follows may be installed elsewhere, and replaces nothing."""
        self._installed.clear()

    def command(
        self, words: Sequence[Word], where: str, place: str, first: int = 0, sure: bool = True
    ) -> Iterator[Entry]:
        """The entries of one command; ``sure``: it certainly runs."""
        texts = [word.text for word in words]
        text = " ".join(texts)
        script = _script(texts)
        arguments = _installed(words)
        if texts[0] in ("cd", "pushd", "popd"):
            self._moved = os.path.join(self._moved, *(texts[1:2] or ["~"]))
        sourced = texts[0] in ("source", ".") and shell.SETS_NO_OPTION.fullmatch(os.path.basename(texts[1]))
        if sourced or _OTHER_ENVIRONMENT.search(text):
            self.in_another_environment()
        if sourced:
            return
        if _OF_A_FILE.search(text):
            yield Unread(where, f"{shown(text)} installs the contents of a file: pass that file, too")
        elif arguments is not None:
            entries = [*self._arguments(arguments, place, first)]
            program = " ".join(texts[: len(texts) - len(arguments)])
            sure = sure and not any(map(_ELSEWHERE.fullmatch, texts[-len(arguments) :]))
            self._replace(program, [entry for entry in entries if isinstance(entry, Pin)], sure)
            yield from entries
        elif _CONDA.fullmatch(os.path.basename(texts[0])) and texts[1:2] == ["install"]:
            yield from self._of_conda(words[2:], place, first)
        elif script:
            yield from self._script(script, where)
        else:
            yield Unread(where, f"{shown(text)} is not parsed: only `pip install` is", mention=text)

    def _replace(self, program: str, pins: Sequence[Pin], sure: bool) -> None:
        for pin in pins:
            if sure and pin.version and not pin.note:
                self.replaced |= self._installed.pop((program, pin.name), set())
        for pin in pins:
            self._installed.setdefault((program, pin.name), set()).add(pin)

    def _script(self, name: str, where: str) -> Iterator[Entry]:
        file = self._find(os.path.join(self._moved, name))
        if file is None or self._depth >= _DEEPEST:
            yield Unread(where, f"runs {shown(name)}, which is not there: pass that script, too")
            return
        if str(file) in self._seen:
            return
        self._seen.add(str(file))
        self._depth += 1
        yield from self.read(self._lines.text(file), place=str(file))
        self._depth -= 1

    def _arguments(self, arguments: Sequence[Word], place: str, first: int) -> Iterator[Entry]:
        left = iter(arguments)
        for word in left:
            argument, where = word.text, f"{place}:{first + word.line}"
            option, sign, value = argument.partition("=")
            if option in _NAMING:
                value = value if sign else next(left, Word("", 0)).text
                yield from self._named(_NAMING[option], value, where)
            elif argument[:2] in ("-r", "-c", "-e") and argument[2:]:
                yield from self._named(argument[:2], argument[2:], where)
            elif _WITH_VALUE.fullmatch(argument):
                next(left, None)
            elif not argument.startswith("-"):
                yield from self._lines.line(argument, where)

    def _of_conda(self, arguments: Sequence[Word], place: str, first: int) -> Iterator[Entry]:
        left = iter(arguments)
        for word in left:
            if _CONDAS_WITH_VALUE.fullmatch(word.text):
                next(left, None)
            elif not word.text.startswith("-"):
                yield of_conda(word.text, f"{place}:{first + word.line}")

    def _named(self, option: str, value: str, where: str) -> Iterator[Entry]:
        if option == "-e":
            yield from self._lines.line(f"-e {value}", where)
            return
        file = self._find(os.path.join(self._moved, value))
        if file is None:
            yield Unread(where, f"names {shown(value)}, which is not there: pass that file, too")
        else:
            yield from self._lines.line(f"{option} {os.path.relpath(file, self._lines.folder)}", where)


def _installed(words: Sequence[Word]) -> Sequence[Word] | None:
    """The arguments of ``pip install``, ``python -m pip install``, ``uv pip install``; None for other commands."""
    for number, word in enumerate(words):
        if _PIP.fullmatch(os.path.basename(word.text)):
            rest = words[number + 1 :]
            at = next((n for n, each in enumerate(rest) if each.text == "install"), None)
            return None if at is None else rest[at + 1 :]
    return None


def _script(words: Sequence[str]) -> str:
    """The script that a command runs; empty for other commands."""
    runs = [word for word in words if not word.startswith("-")]
    if len(runs) > 1 and re.fullmatch(r"(?:ba|z|da)?sh|source|\.", os.path.basename(runs[0])):
        return runs[1]
    return runs[0] if runs and runs[0].endswith((".sh", ".bash")) else ""


def is_one(text: str) -> bool:
    """Whether the text begins like a shell script."""
    return re.match(r"#!\s*\S*/(?:env\s+)?(?:ba|z|da)?sh\b", text) is not None
