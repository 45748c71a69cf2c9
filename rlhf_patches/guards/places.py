"""A module's text, what is known of it, and where in it a function is: the data that the guards pass to each other."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any, NamedTuple, Union

FunctionNode = Union[ast.FunctionDef, ast.AsyncFunctionDef]


class Unreadable(Exception):
    """The source of a module cannot be had; the message says why."""


class NotFound(Exception):
    """A module or function does not exist; the message names it."""


class Slice(NamedTuple):
    """What a function's slice is made of, beside its first line, which its `Place` has.

    Attributes:
        last_line: the function's.
        classes: the names of the classes around it, outermost first.
        imported: names in it that the module imports; and ``super``, if the module mentions it.
        future: what the module imports from ``__future__``.
    """

    last_line: int
    classes: tuple[str, ...]
    imported: tuple[str, ...]
    future: tuple[str, ...]


class Place(NamedTuple):
    """Where a function is in a text and how it is called, without its syntax tree.

    Attributes:
        name: its own name.
        lineno: the line of its ``def``.
        first_line: the line that its code object states: its first decorator's, if it has any.
        column: of its ``def``, in bytes.
        is_async: whether it is an ``async def``.
        parameters: name, `inspect.Parameter.kind` as a number, and whether there is a default.
        slice: what is compiled in place of the whole text, where it is known to give the same code; else None.
    """

    name: str
    lineno: int
    first_line: int
    column: int
    is_async: bool
    parameters: tuple[tuple[str, int, bool], ...]
    slice: Slice | None = None


class Known:
    """What is known of one text: its future statements, its imports, and by qualified name the functions, or why not.

    Of a function: its first line, the digest of its text, and the facts of its text.
    """

    def __init__(self, future: Sequence[str], imported: Sequence[str], functions: dict[str, Any]) -> None:
        self.future, self.imported, self.functions = tuple(future), frozenset(imported), functions


class Source(NamedTuple):
    """The text of a module, as Python itself would decode it (universal newlines, no byte order mark).

    ``known`` is what `known.look_up` has found of it.
    """

    module: str
    filename: str
    text: str
    known: Known | None = None
