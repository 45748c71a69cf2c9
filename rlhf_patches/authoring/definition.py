"""Write changes as the Python code of a patch's module, and outside text as inert comments and strings."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

from ..definitions.changes import Change, Rewrite
from ..definitions.words import printable

_STEP = "    "


def one_line(change: Change) -> str:
    """A change as a call on one line."""
    named = _arguments(change)
    positional = [named.pop(name) for name in ("target", "pattern", "replacement") if isinstance(change, Rewrite)]
    arguments = [*map(repr, positional), *(f"{name}={value!r}" for name, value in named.items())]
    return f"{type(change).__name__}({', '.join(arguments)})"


def indented(change: Change, depth: int) -> str:
    """A change as a call, one argument per line, in the layout of ruff and black; ``depth`` in steps of four blanks."""
    outer, inner = _STEP * depth, _STEP * (depth + 1)
    lines = [f"{inner}{name}={_literal(value, depth + 1)}," for name, value in _arguments(change).items()]
    return "\n".join([f"{outer}{type(change).__name__}(", *lines, f"{outer})"])


def comment(text: str) -> str:
    """Outside text as a comment that nothing in the text can end.

    In Python a carriage return ends a line, and a NUL the whole text; `str.splitlines` knows eight more line ends.
    """
    # In a file's first two lines this would set the encoding.
    return "# " + re.sub(r"coding(?=[:=])", "coding ", printable(text))


def literal(text: str) -> str:
    """A text as a Python literal, in double quotes unless it contains some; invisible characters are escaped."""
    if '"' in text and "'" not in text:
        return repr(text)
    quoted = printable(json.dumps(text, ensure_ascii=False))
    return quoted if ast.literal_eval(quoted) == text else repr(text)


def _arguments(change: Change) -> dict[str, Any]:
    """The arguments of a change, without defaults."""
    arguments = {}
    for each in fields(change):
        value = getattr(change, each.name)
        default = each.default if each.default_factory is MISSING else each.default_factory()
        if value != default:
            arguments[each.name] = dict(value) if isinstance(value, Mapping) else value
    return arguments


def _literal(value: object, depth: int) -> str:
    if isinstance(value, str):
        lines = value.splitlines(keepends=True)
        if len(lines) < 2:
            return literal(value)
        inner = "".join(f"{_STEP * (depth + 1)}{literal(line)}\n" for line in lines)
        return f"(\n{inner}{_STEP * depth})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{literal(key)}: {literal(text)}' for key, text in value.items())}}}"
    if isinstance(value, Sequence):
        return f"({', '.join(map(literal, value))},)"
    return repr(value)
