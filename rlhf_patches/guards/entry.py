"""Inserts a statement at the beginning of a function, on the line of its first statement, so that no line moves.

It edits the text if that line permits it, since a syntax tree takes twice the time to compile: milliseconds for a long
function, and each start has dozens of them.
"""

from __future__ import annotations

import ast
import re
from types import CodeType

from . import sources

_STRING = (
    r"""[rRbBuUfF]{0,2}(?:'''(?:\\.|[^\\])*?'''|\"\"\"(?:\\.|[^\\])*?\"\"\"|'(?:\\.|[^\\\n'])*'|"(?:\\.|[^\\\n"])*")"""
)
_PIECE = re.compile(rf"\#[^\n]*|{_STRING}|[()\[\]{{}}:]", re.DOTALL)
_BLANK = re.compile(r"(?:[ \t\f]*(?:\#[^\n]*)?\n)*[ \t\f]*")
_DOCSTRING = re.compile(rf"{_STRING}(?=[ \t]*(?:;|\#|\n|\Z))", re.DOTALL)
_OTHER = re.compile(r"(?:if|for|while|with|try|def|class|async|match|case)\b|@|['\"]|[rRbBuUfF]{1,2}['\"]")
"""The beginning of a statement that cannot follow another one on its line, or of a string."""


def compiled(text: str, filename: str, name: str, line: int, statement: str) -> CodeType:
    """Compile a module with a statement inserted at the beginning of one of its functions.

    Args:
        text: the module's text, or a slice of it.
        filename: the filename for the code.
        name: the function's name.
        line: the line of its ``def``.
        statement: a call.

    Raises:
        SyntaxError, ValueError, RecursionError: it does not compile.
    """
    new = _with(text, line, statement)
    if new is None:
        return _by_tree(text, filename, name, line, statement)
    with sources.no_warnings():
        return compile(new, filename, "exec", dont_inherit=True)


def _with(text: str, line: int, statement: str) -> str | None:
    """Return the text with the statement; None if it must be inserted into the tree."""
    start = 0
    for _ in range(line - 1):
        start = text.index("\n", start) + 1
    depth = 0
    for piece in _PIECE.finditer(text, start):
        token = piece[0]
        depth += (token in "([{") - (token in ")]}")
        if token == ":" and not depth:
            break
    else:
        return None
    blank = _BLANK.match(text, piece.end())
    at = blank.end() if blank else piece.end()
    docstring = _DOCSTRING.match(text, at)
    if docstring is not None:
        return f"{text[: docstring.end()]}; {statement}{text[docstring.end() :]}"
    if _OTHER.match(text, at) or at == len(text):
        return None
    return f"{text[:at]}{statement}; {text[at:]}"


def _by_tree(text: str, filename: str, name: str, line: int, statement: str) -> CodeType:
    with sources.no_warnings():
        tree = ast.parse(text, filename)
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and (node.name, node.lineno) == (name, line):
                (call,) = ast.parse(statement).body
                for each in ast.walk(call):
                    ast.copy_location(each, node.body[0])
                node.body.insert(int(ast.get_docstring(node, clean=False) is not None), call)
                return compile(tree, filename, "exec", dont_inherit=True)
    raise ValueError(f"no function {name} in line {line}")
