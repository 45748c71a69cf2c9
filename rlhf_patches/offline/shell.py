"""The commands of a shell script, with its own constants and arrays in place. Nothing is run.

tree-sitter's grammar of bash, which ast-grep contains, reads the script. A word that depends on the environment, on a
command's output or on a condition is not known; its text shows what it depends on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Union

from . import inputs, shell_flow

if TYPE_CHECKING:
    from ast_grep_py import SgNode

LARGEST = 2**17
"""The most characters of a script, and of all that it sources."""

_MOST_ARRAYS = 1000  # the parser takes quadratic time for arrays that are not closed
_DEEPEST = 8  # scripts that source or contain each other
_PLAIN = re.compile(r"\$(?:\{(\w+)(\[[@*]\])?\}|(\w+))")
_DEFAULT = re.compile(r"\$\{(\w+):?-.*\}", re.DOTALL)
_ALL = re.compile(r"\$@|\$\{@\}|\$\{[^}]*\[@\][^}]*\}")
_OWN_FOLDER = re.compile(
    r"\$\(\s*cd\b[^&;|]*\bdirname\b[^&;|.]*(?:BASH_SOURCE|\$0)[^&;|]*&?>?[^&;|]*&&\s*pwd(?: -P)?\s*\)"
)
_NUMBERS = re.compile(
    r"\$\(\(.*\)\)|(?:\$\(\s*|`)(?:expr|nproc|seq)(?![a-z_-])[^;|&]*(?:\)|`)", re.DOTALL
)  # no options
_NEEDS_A_WORD = re.compile(r"""\$\{\w+:-["']?[^-\s"'][^\s"']*["']?\}""")  # its default is one
_EXPANSIONS = re.compile(r"\$\{[^}]*\}|\$\w+|\$\(.*\)|`.*`")
_LONG_WORD = 1000
_BRACES = re.compile(r"\{[^{}]*(?:,|\.\.)[^{}]*\}")
_SHELLS = ("bash", "sh", "zsh", "sbatch", "ssh")
SETS_NO_OPTION = re.compile(r"activate|(?:conda|mamba|micromamba|modules?)\.sh|\.bashrc|\.profile|lmod.*")
"""Files that choose an environment, when sourced, and set no option of a run."""


class ShellError(Exception):
    """A script is too large or is nested too deeply; the message has the reason."""


class Word(NamedTuple):
    """A word of a command.

    Attributes:
        text: the word; parts that are not known are as the script has them, without blanks.
        line: its line in the script.
        known: whether the script alone determines the text.
        single: whether the shell makes one word of it; otherwise it may become several words or none.
    """

    text: str
    line: int
    known: bool = True
    single: bool = True


class Command(NamedTuple):
    """A simple command; ``words`` has at least one word. ``sure``: it runs wherever the script does, if none fails."""

    words: tuple[Word, ...]
    line: int
    sure: bool = True


class Script(NamedTuple):
    """The commands of a script in their order, of every branch, and of functions as they are defined.

    Attributes:
        commands: without calls of the script's own functions.
        not_understood: the lines that the grammar does not understand.
    """

    commands: tuple[Command, ...]
    not_understood: tuple[int, ...]


def read(text: str, folder: Path | None = None, values: Mapping[str, str] | None = None) -> Script:
    """The commands of a script.

    Args:
        text: the script.
        folder: where the script is, to read the files that it sources.
        values: variables that the script begins with.

    Raises:
        ShellError: the script is too large or is nested too deeply.
    """
    reader = _Reader(folder, values or {})
    try:
        commands = tuple(reader.read(text))
    except RecursionError as error:
        raise ShellError("is nested too deeply") from error
    own = [command for command in commands if command.words[0].text not in reader.functions]
    return Script(tuple(own), tuple(sorted(set(reader.not_understood))))


# A scalar, an array; None if it cannot be known.
_Value = Union[Word, list[Word], None]


class _Reader:
    def __init__(self, folder: Path | None, values: Mapping[str, str]) -> None:
        self.functions = set[str]()
        self.not_understood: list[int] = []
        self._folder = folder
        self._left = LARGEST
        self._depth = 0
        self._values: dict[str, _Value] = {name: Word(value, 0) for name, value in values.items()}
        self._unsure = set[str]()
        self._sure = True
        self._text, self._first = "", 0
        self._at: int | None = None  # the line that sources the text

    def read(self, text: str, first: int = 0, at: int | None = None) -> Iterator[Command]:
        """The commands of a text whose first line has the number ``first + 1``, or which line ``at`` sources."""
        from ast_grep_py import SgRoot

        text = re.sub(r"\\\s*\Z", "", text.replace("\r\n", "\n").replace("\0", " "))  # a backslash at the end
        self._left -= len(text)
        if self._left < 0:
            raise ShellError(f"has more than {LARGEST >> 10} KiB, the limit for a script")
        if text.count("=(") > _MOST_ARRAYS:
            raise ShellError(f"has more than {_MOST_ARRAYS} arrays")
        outer = self._text, self._first, self._at
        self._text, self._first, self._at = text, first, at or self._at
        self._depth += 1
        root = SgRoot(text, "bash").root()
        self._unsure |= set(shell_flow.assigned(root))
        yield from self._statement(root)
        self._depth -= 1
        self._text, self._first, self._at = outer

    def _statement(self, node: SgNode) -> Iterator[Command]:
        sure, self._sure = self._sure, self._sure and not shell_flow.may_not_run(node)
        yield from self._of_kind(node, node.kind())
        self._sure = sure

    def _of_kind(self, node: SgNode, kind: str) -> Iterator[Command]:
        if kind == "command":
            yield from self._command(node)
        elif kind == "variable_assignment":
            self._assign(node)
        elif kind == "unset_command":
            for name in re.findall(r"\w+", node.text()):
                self._values[name] = None
        elif kind == "redirected_statement":
            commands = [each for child in node.children() for each in self._statement(child)]
            self._read_document(commands, node)
            if commands and os.path.basename(commands[0].words[0].text) in _SHELLS:
                within = [*self._documents(node)]
                commands = commands[bool(within) :] + within
            yield from commands
        elif kind == "function_definition":
            self.functions.add(node.children()[1 if node.text().startswith("function") else 0].text())
            yield from self._children(node)
        elif kind == "ERROR" or (not node.text() and kind != "program" and not node.children()):
            self.not_understood.append(self._line(node))
            yield from self._children(node)
        elif kind not in ("comment", "test_command", "heredoc_body", "command_substitution"):
            yield from self._children(node)

    def _children(self, node: SgNode) -> Iterator[Command]:
        for child in node.children():
            yield from self._statement(child)

    def _documents(self, node: SgNode) -> Iterator[Command]:
        for redirect in node.children():
            for body in redirect.children() if redirect.kind() == "heredoc_redirect" else ():
                if body.kind() == "heredoc_body" and self._depth < _DEEPEST:
                    yield from self.read(body.text(), self._line(body) - 1)

    def _read_document(self, commands: list[Command], node: SgNode) -> None:
        """Set the variable of ``read -r -d '' NAME <<EOF``."""
        words = [word.text for word in commands[0].words] if commands else []
        if self._sure and words[:1] == ["read"] and words[-3:-1] == ["-d", ""]:
            bodies = [each for child in node.children() for each in child.children() if each.kind() == "heredoc_body"]
            text = _PLAIN.sub(self._in_document, bodies[0].text().replace("\\\n", "")) if bodies else ""
            self._values[words[-1]] = Word(text, self._line(node), not re.search(r"[$`]", text)) if text else None

    def _in_document(self, found: re.Match[str]) -> str:
        value = self._value(found[1] or found[3])
        return value.text if isinstance(value, Word) and not found[2] else found[0]

    def _command(self, node: SgNode) -> Iterator[Command]:
        words: list[Word] = []
        self._lines_before(node)
        for child in node.children():
            kind = child.kind()
            if kind == "ERROR":
                self.not_understood.append(self._line(child))
            elif kind == "command_name":
                words += self._words(child.children()[0] if child.children() else child)
            elif kind not in ("comment", "variable_assignment") and not kind.endswith("_redirect"):
                words += self._words(child)
        if not words:
            return
        name = os.path.basename(words[0].text)
        if name in ("source", ".", "eval") and len(words) > 1:
            yield from self._other(name, words)
            return
        if name in ("read", "mapfile", "readarray", "printf", "getopts", "let"):
            self._values |= {word.text.partition("=")[0]: None for word in words[1:]}
        code = next((n for n, word in enumerate(words) if re.fullmatch(r"-[a-z]*c", word.text)), 0)
        if name in _SHELLS[:3] and 0 < code < len(words) - 1 and words[code + 1].known and self._depth < _DEEPEST:
            yield from self.read(words[code + 1].text, words[code + 1].line - 1)
            return
        yield Command(tuple(words), words[0].line, self._sure)

    def _lines_before(self, node: SgNode) -> None:
        """Assignments of the lines before, which the grammar takes for the command's own."""
        children = node.children()
        begins = [child.range().start.index for child in children]
        ends = [child.range().end.index for child in children]
        last = 0
        for number, child in enumerate(children[:-1], 1):
            if child.kind() != "variable_assignment":
                break
            gap = self._text[ends[number - 1] : begins[number]]
            last = number if "\n" in gap.replace("\\\n", "") else last
        for child in children[:last]:
            self._assign(child)

    def _other(self, name: str, words: list[Word]) -> Iterator[Command]:
        """What ``source FILE`` or ``eval TEXT`` reads; if it is not there, it may set every variable."""
        whole = all(word.known for word in words) and self._depth < _DEEPEST
        if name == "eval" and whole:
            yield from self.read(" ".join(word.text for word in words[1:]), words[0].line - 1)
            return
        if name == "eval":
            yield Command(tuple(words), words[0].line)
        elif SETS_NO_OPTION.fullmatch(os.path.basename(words[1].text)):
            yield Command(tuple(words), words[0].line, self._sure)
            return
        elif whole:
            file = inputs.beside(self._folder, words[1].text)
            try:
                if file is not None:
                    yield from self.read(inputs.text(str(file), self._left), at=words[0].line)
                    return
            except inputs.InputError:
                pass
        if name != "eval":
            yield Command(tuple(words), words[0].line)
        self._values.clear()

    def _assign(self, node: SgNode) -> None:
        name, sign, *value = node.children()
        key = name.text()
        if name.kind() != "variable_name":  # an element of an array
            self._values[key.partition("[")[0]] = None
            return
        if value and value[0].kind() == "array":
            self._values[key] = self._added(key, sign, [*self._array(value[0])])
            return
        text = self._joined(value[0]) if value else Word("", self._line(node))
        self._values[key] = self._added(key, sign, text)

    def _added(self, key: str, sign: SgNode, value: Word | list[Word]) -> _Value:
        if sign.text() != "+=":
            return value
        before = self._values.get(key, [] if isinstance(value, list) else None)
        if isinstance(before, list) and isinstance(value, list):
            return before + value
        if isinstance(before, Word) and isinstance(value, Word):
            return value._replace(text=before.text + value.text, known=before.known and value.known)
        return None

    def _array(self, node: SgNode) -> Iterator[Word]:
        for child in node.children():
            if child.kind() not in ("(", ")", "comment"):
                yield from self._words(child)

    def _words(self, node: SgNode) -> list[Word]:
        """The words that the shell makes of an argument."""
        kind, text, line = node.kind(), node.text(), self._line(node)
        if kind in ("word", "number", "variable_name", "=", "command_name"):
            several = _BRACES.search(text) is not None
            return [Word(re.sub(r"\\(.)", r"\1", re.sub(r"\\\n", "", text)), line, not several, not several)]
        if kind == "raw_string":
            return [Word(text[1:-1], line)]
        if kind == "string":
            every = re.fullmatch(r'"\$\{(\w+)\[@\]\}"', text)
            value = self._value(every[1]) if every else None
            if isinstance(value, list):
                return [*value]
            return [self._joined(node)]
        if kind in ("simple_expansion", "expansion"):
            return self._expanded(text, line)
        if kind == "concatenation":
            if _BRACES.search(re.sub(r"\$\{[^}]*\}|'[^']*'|\"[^\"]*\"", "", text)):
                return [Word(_squeezed(text), line, known=False, single=False)]
            words = [Word("", line)]
            for child in node.children():
                first, *more = self._words(child) or [Word("", line)]
                known = words[-1].known and first.known
                words[-1] = Word(words[-1].text + first.text, line, known, words[-1].single and not _ALL.search(text))
                words += more
            if not words[-1].known and not _has_text(text):
                words[-1] = words[-1]._replace(single=False)
            return words
        one = kind == "process_substitution" or _NUMBERS.fullmatch(text) is not None
        return [Word(_squeezed(text), line, known=False, single=one)]

    def _expanded(self, text: str, line: int) -> list[Word]:
        """The words of an expansion outside quotes."""
        found = _PLAIN.fullmatch(text)
        value = self._value(found[1] or found[3]) if found else self._with_default(text)
        if value is None or "IFS" in self._values:
            return [Word(_squeezed(text), line, known=False, single=_NEEDS_A_WORD.fullmatch(text) is not None)]
        scalars = [value] if isinstance(value, Word) else [*value]
        if found and isinstance(value, list) and not found[2]:
            scalars = scalars[:1]
        words = []
        for scalar in scalars:
            for part in scalar.text.split():
                unknown = not scalar.known and re.search(r"[$`{]", part) is not None
                one = _NEEDS_A_WORD.fullmatch(part) or _NUMBERS.fullmatch(part) or _has_text(part)
                words.append(Word(part, line, not unknown, not unknown or bool(one)))
        return words

    def _joined(self, node: SgNode) -> Word:
        """One word, as within double quotes or at the right of an assignment."""
        line, text = self._line(node), node.text()
        if _OWN_FOLDER.fullmatch(text.strip('"')) and self._folder is not None:
            return Word(str(self._folder.absolute()), line)
        if node.kind() in ("simple_expansion", "expansion"):
            found = _PLAIN.fullmatch(text)
            value = self._value(found[1] or found[3]) if found else self._with_default(text)
            if isinstance(value, Word):
                return value._replace(line=line)
            if isinstance(value, list) and found:
                every = value if found[2] else value[:1]
                return Word(" ".join(word.text for word in every), line, all(word.known for word in every))
            return Word(_squeezed(text), line, known=False, single=not _ALL.fullmatch(text))
        if node.kind() == "string":
            parts, at, single = [], node.range().start.index + 1, True
            for child in node.children()[1:-1]:
                if child.kind() != "string_content":
                    parts.append(Word(_unescaped(self._text[at : child.range().start.index]), line))
                    parts.append(self._joined(child))
                    single = single and parts[-1].single
                    at = child.range().end.index
            parts.append(Word(_unescaped(self._text[at : node.range().end.index - 1]), line))
            return Word("".join(part.text for part in parts), line, all(part.known for part in parts), single)
        if node.kind() == "concatenation":
            parts = [self._joined(child) for child in node.children()]
            return Word("".join(part.text for part in parts), line, all(part.known for part in parts))
        if node.kind() in ("word", "number", "raw_string"):
            return self._words(node)[0]._replace(known=True, single=True)
        return Word(_squeezed(text), line, known=False)

    def _value(self, name: str) -> _Value:
        return None if name in self._unsure else self._values.get(name)

    def _with_default(self, text: str) -> _Value:
        found = _DEFAULT.fullmatch(text)
        value = self._value(found[1]) if found else None
        return value if isinstance(value, Word) and value.text else None

    def _line(self, node: SgNode) -> int:
        return self._at or self._first + node.range().start.line + 1


def _unescaped(text: str) -> str:
    """A text within double quotes."""
    return re.sub(r'\\([\\"$`])', r"\1", text.replace("\\\n", ""))


def _has_text(word: str) -> bool:
    """Whether a word has a part outside its expansions, so that it is meant as one word."""
    return len(word) < _LONG_WORD and _EXPANSIONS.sub("", word) != ""


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)
