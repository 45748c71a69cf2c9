"""A module's text, the known facts of it, and the place of a function in it: the guards' shared data."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any, NamedTuple, Union

FunctionNode = Union[ast.FunctionDef, ast.AsyncFunctionDef]


class Unreadable(Exception):
    """The source of a module is not available; the message gives the reason."""


class NotFound(Exception):
    """A module or function does not exist; the message names it."""


class Slice(NamedTuple):
    """The parts of a function's slice, without its first line, which its `Place` has.

    Attributes:
        last_line: the function's last line.
        classes: the names of the enclosing classes, outermost first.
        imported: names in it that the module imports; and ``super``, if the module mentions it.
        future: the module's imports from ``__future__``.
    """

    last_line: int
    classes: tuple[str, ...]
    imported: tuple[str, ...]
    future: tuple[str, ...]


class Place(NamedTuple):
    """The place of a function in a text, and its parameters, without its syntax tree.

    Attributes:
        name: its unqualified name.
        lineno: the line of its ``def``.
        first_line: the first line of its code object: its first decorator's, if it has any.
        column: the column of its ``def``, in bytes.
        is_async: whether it is an ``async def``.
        parameters: name, `inspect.Parameter.kind` as a number, and whether there is a default.
        slice: the slice that is compiled instead of the whole text, if it is known to give the same code; else None.
    """

    name: str
    lineno: int
    first_line: int
    column: int
    is_async: bool
    parameters: tuple[tuple[str, int, bool], ...]
    slice: Slice | None = None


class Known:
    """The facts of one text: its future statements, its imports, and the functions by qualified name, or why not.

    A function has its first line, the digest of its text, and the facts of its text.
    """

    def __init__(self, future: Sequence[str], imported: Sequence[str], functions: dict[str, Any]) -> None:
        self.future, self.imported, self.functions = tuple(future), frozenset(imported), functions


class Source(NamedTuple):
    """The text of a module, as Python decodes it (universal newlines, no byte order mark).

    ``known`` is the result of `known.look_up`.
    """

    module: str
    filename: str
    text: str
    known: Known | None = None
