"""The distributions of ``pip install`` and ``uv pip install`` in a Dockerfile; other commands are only searched."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence

from .pin_lines import Lines
from .pins import Entry, PinsError, Unread, shown

_LARGEST = 2**18  # characters; the largest Dockerfiles have some tens of thousands
_COMMENT = re.compile(r"\s*#")
_HEREDOC = re.compile(r"""<<-?\s*["']?(\w+)["']?""")
_INSTRUCTION = re.compile(r"\s*(?:ONBUILD\s+)?(RUN|FROM|COPY|ADD)\s+(.*)", re.IGNORECASE | re.DOTALL)
_FROM = re.compile(r"FROM(\s+--platform=\S+)?\s+\S+(\s+(AS|as)\s+\S+)?")
_RUN_OPTIONS = re.compile(r"(?:--[a-z]+=\S+\s+)*")
_PIP = re.compile(r"pip[\d.]*(?:\.exe)?")
# Commands of other tools that install from a file.
_OF_A_FILE = re.compile(
    r"\b(?:(?:uv|pip|pdm|pipenv|pixi|rye) sync|(?:poetry|pdm|pipenv|pixi) install"
    r"|(?:conda|mamba) env (?:create|update))\b"
)
_REDIRECT = re.compile(r"[<>]+&?|&>+|>\|")
_SEPARATORS = re.compile(r"[;|&()]+")
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


def read(text: str, place: str, lines: Lines) -> Iterator[Entry]:
    """Read a Dockerfile's text.

    Raises:
        PinsError: the text is too long.
    """
    if len(text) > _LARGEST:
        raise PinsError(f"{place} has more than 256 KiB, the limit for a Dockerfile")
    for number, instruction, rest in _instructions(text):
        where = f"{place}:{number}"
        if instruction == "RUN":
            yield from _run(_RUN_OPTIONS.sub("", rest, count=1), where, lines)
        else:
            yield Unread(where, f"{instruction} {shown(rest)} is not read", mention=rest)


def is_one(text: str) -> bool:
    """Whether the text begins like a Dockerfile."""
    for line in text[:10_000].splitlines():
        if line.strip() and not _COMMENT.match(line) and not line.startswith("ARG "):
            return _FROM.fullmatch(line.rstrip()) is not None
    return False


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """Instructions that may install a distribution, with their first line; a here-document's lines are each a RUN."""
    begun, first, end = "", 0, None
    for number, line in enumerate(text.splitlines(), 1):
        if end is not None and not begun and line.strip() == end:
            end = None
            continue
        if _COMMENT.match(line):  # Docker removes comments from continued lines, too
            continue
        first = first if begun else number
        if line.rstrip().endswith("\\"):
            begun += line.rstrip()[:-1] + " "
            continue
        whole, begun = begun + line, ""
        if end is not None:
            yield first, "RUN", whole
            continue
        read = _INSTRUCTION.fullmatch(whole)
        if read is None:
            continue
        document = _HEREDOC.search(read[2])
        end = document[1] if document else None
        yield first, read[1].upper(), _HEREDOC.sub("", read[2]) if document else read[2]
    if begun:
        read = _INSTRUCTION.fullmatch(begun)
        if read is not None:
            yield first, read[1].upper(), read[2]


def _run(command: str, where: str, lines: Lines) -> Iterator[Entry]:
    for words in _commands(command):
        if words is None:
            yield Unread(where, f"{shown(command)} is not a shell command", mention=command)
            return
        arguments = _installed(words)
        text = " ".join(words)
        if _OF_A_FILE.search(text):
            yield Unread(where, f"{shown(text)} installs the contents of a file: pass that file, too")
        elif arguments is None:
            yield Unread(where, f"{shown(text)} is not parsed: only `pip install` is", mention=text)
        else:
            yield from _arguments(arguments, where, lines)


def _commands(text: str) -> Iterator[list[str] | None]:
    """The words of each command; None if they cannot be determined."""
    if text.lstrip().startswith("["):
        try:
            words = json.loads(text)
            yield [str(word) for word in words]
            return
        except (ValueError, TypeError, RecursionError):
            pass
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";|&()<>")
    lexer.whitespace_split, lexer.commenters = True, ""
    words, redirected = [], False
    try:
        for word in lexer:
            if word.startswith("#"):
                break
            if redirected:
                redirected = False
            elif _REDIRECT.fullmatch(word):
                redirected = True
                if words and words[-1] in ("1", "2"):  # 2>&1
                    words.pop()
            elif _SEPARATORS.fullmatch(word):
                yield words
                words = []
            else:
                words.append(word)
    except ValueError:  # a quotation that is not closed
        yield None
        return
    yield words


def _installed(words: Sequence[str]) -> Sequence[str] | None:
    """The arguments of ``pip install``, ``python -m pip install``, ``uv pip install``; None for other commands."""
    for number, word in enumerate(words):
        if _PIP.fullmatch(os.path.basename(word)):
            rest = list(words[number + 1 :])
            return rest[rest.index("install") + 1 :] if "install" in rest else None
    return None


def _arguments(arguments: Sequence[str], where: str, lines: Lines) -> Iterator[Entry]:
    left = iter(arguments)
    for argument in left:
        option, sign, value = argument.partition("=")
        if option in _NAMING:
            value = value if sign else next(left, "")
            yield from _named(_NAMING[option], value, where, lines)
        elif argument[:2] in ("-r", "-c", "-e") and argument[2:]:
            yield from _named(argument[:2], argument[2:], where, lines)
        elif _WITH_VALUE.fullmatch(argument):
            next(left, None)
        elif not argument.startswith("-"):
            yield from lines.line(argument, where)


def _named(option: str, value: str, where: str, lines: Lines) -> Iterator[Entry]:
    if option != "-e" and value.startswith(("/", "$", "~")):
        yield Unread(where, f"names {shown(value)}, a file of the image: pass that file, too")
    else:
        yield from lines.line(f"{option} {value}", where)
