"""Patterns of ast-grep: their matches in a function, and the edits of a rewrite."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..definitions.errors import DefinitionError
from . import sources
from .edits import Edit, Unrecognized
from .memory import remembered
from .places import FunctionNode, Place, Source

if TYPE_CHECKING:
    from ast_grep_py import Rule, SgNode

    from ..definitions.changes import Rewrite, Shape

_ast_grep: Any = None
_without_ast_grep: str | None = None


def load_ast_grep() -> None:
    """Import ast-grep if it is installed and not imported yet; known texts save these milliseconds.

    The engine calls it before it takes its lock, under which nothing is imported.
    """
    global _ast_grep, _without_ast_grep
    if ast_grep_is_known():
        return
    try:
        import ast_grep_py
    except ImportError as error:  # a subinterpreter, or it is not installed
        _without_ast_grep = f"ast_grep_py, which locates the code to rewrite, cannot be imported: {error}"
    else:
        _ast_grep = ast_grep_py


def ast_grep_is_known() -> bool:
    """Whether `load_ast_grep` has been called."""
    return _ast_grep is not None or _without_ast_grep is not None


_MOST_LINES = 5  # named if a pattern occurs too often
_METAVARIABLE = re.compile(r"\$+([A-Z_][A-Z0-9_]*)?")


def find_edits(rewrite: Rewrite, source: Source, place: Place) -> list[Edit]:
    """Return the edits of a rewrite in a function of ``source``.

    Raises:
        Unrecognized: the pattern does not occur exactly as often as expected, or not where expected.
    """
    edits = sorted(_edit(rewrite, match, source.text) for match in find(rewrite, source, place))
    if any(first.overlaps(second) for first, second in itertools.pairwise(edits)):
        raise Unrecognized(f"matches of {rewrite.pattern!r} in {rewrite.target} overlap")
    return edits


def find(shape: Rewrite | Shape, source: Source, place: Place) -> list[SgNode]:
    """Return the pattern's matches in a function of ``source``.

    Raises:
        Unrecognized: the pattern does not occur exactly as often as expected, or not where expected.
    """
    function = _function_node(source, place)
    for at, pattern in enumerate(shape.alongside):
        if not _find_all(function, pattern):
            raise Unrecognized(why_not(shape, ("alongside", at)))
    for at, pattern in enumerate(shape.unless):
        if _find_all(function, pattern):
            raise Unrecognized(why_not(shape, ("unless", at)))
    matches = _find_all(function, shape.pattern, shape.inside)
    if len(matches) != shape.matches:
        lines = ", ".join(str(match.range().start.line + 1) for match in matches[:_MOST_LINES])
        raise Unrecognized(why_not(shape, len(matches), f" (at line {lines})" if lines else ""))
    return matches


def why_not(shape: Rewrite | Shape, matches: int | Sequence[Any], lines: str = "") -> str:
    """Return why a function is not recognized.

    Args:
        shape: the expected shape.
        matches: the pattern's number of matches; or the index of the ``alongside`` or ``unless`` pattern that fails.
        lines: the lines of the pattern's matches.
    """
    if isinstance(matches, int):
        where = f" inside {shape.inside!r}" if shape.inside is not None else ""
        times = f"{shape.pattern!r}{where} {matches} times, expected {shape.matches}"
        return f"{shape.target} contains {times}{lines}{_doubt(shape.pattern if not matches else None)}"
    kind, at = matches
    pattern = getattr(shape, kind)[at]
    if kind == "alongside":
        return f"{shape.target} does not contain {pattern!r}{_doubt(pattern)}"
    return f"{shape.target} contains {pattern!r}, which already repairs it"


def no_python(pattern: str) -> str:
    """Return the problem of a pattern that Python does not parse; ast-grep ignores the parts that it cannot read."""
    try:
        ast.parse(_METAVARIABLE.sub(lambda variable: variable[1] or "_", pattern))
    except SyntaxError as error:
        return f"is not valid Python by itself ({error.msg}), so it may never match"
    return ""


def _doubt(pattern: str | None) -> str:
    wrong = no_python(pattern) if pattern else ""
    return f"; the pattern {wrong}" if wrong else ""


def matches(source: Source, node: FunctionNode, pattern: str, inside: str | None = None) -> list[SgNode]:
    """Return each match of a pattern in a function.

    Raises:
        DefinitionError: ast-grep rejects the pattern.
    """
    return _find_all(_function_node(source, node), pattern, inside)


def _find_all(function: SgNode, pattern: str, inside: str | None = None) -> list[SgNode]:
    rule: Rule = {"pattern": pattern}
    if inside is not None:
        rule["inside"] = {"pattern": inside}
    try:
        return function.find_all(_ast_grep.Config(rule=rule))
    except UnicodeEncodeError as error:
        raise DefinitionError(f"the pattern {pattern!r} is not valid UTF-8") from error
    except RuntimeError as error:  # its text continues with the stacks of ast-grep and of Python
        why = " ".join(str(error).partition("Stack backtrace")[0].rpartition(": ")[2].split()).replace(
            "\N{MICRO SIGN}", "$"
        )  # ast-grep's replacement of a dollar sign
        raise DefinitionError(f"ast-grep rejects the pattern {pattern!r}: {why}") from error


def check_ast_grep() -> None:
    """Check that this process can search for patterns.

    Raises:
        ImportError: it cannot; only the patches that rewrite fail with it.
    """
    load_ast_grep()
    if _without_ast_grep is not None:
        raise ImportError(_without_ast_grep)


def _function_node(source: Source, node: FunctionNode | Place) -> SgNode:
    check_ast_grep()
    for candidate in remembered(("nodes", source.text), lambda: _by_line(source.text)).get(node.lineno, ()):
        name = candidate.field("name")
        if name is not None and name.text() == node.name:
            return candidate
    raise Unrecognized(f"ast-grep and Python disagree on where {node.name} is in {source.filename}")


def _by_line(text: str) -> dict[int, list[SgNode]]:
    by_line: dict[int, list[SgNode]] = {}
    for function in _ast_grep.SgRoot(text, "python").root().find_all(kind="function_definition"):
        by_line.setdefault(function.range().start.line + 1, []).append(function)
    return by_line


def _edit(rewrite: Rewrite, match: SgNode, module_text: str) -> Edit:
    def stands_for(variable: re.Match[str]) -> str:
        name = variable.group(1)
        if name in rewrite.uses:
            module, _, path = rewrite.uses[name].partition(":")
            return f'__import__("{module}", fromlist=("*",)).{path}'
        bound = match.get_match(name)
        if bound is None:
            raise Unrecognized(f"the replacement in {rewrite.target} uses ${name}, which the pattern does not bind")
        return _as_operand(bound.text())

    bounds, parent = match.range(), match.parent()
    is_statement = match.kind().endswith(("_statement", "_definition")) or (
        parent is not None and parent.kind() == "expression_statement"
    )
    template = rewrite.replacement
    if is_statement:
        # Before the substitution: the match may contain a string of several lines.
        line = module_text[bounds.start.index - bounds.start.column : bounds.start.index]
        template = template.replace("\n", "\n" + line[: len(line) - len(line.lstrip())])
    text = re.sub(r"\$([A-Z_][A-Z0-9_]*)", stands_for, template)
    old, new = match.text().count("\n"), text.count("\n")
    if new > old:
        raise Unrecognized(
            f"the replacement in {rewrite.target} has {new + 1} lines, more than the {old + 1} it replaces"
        )
    if is_statement:
        text += "\n" * (old - new)
    elif old:
        # Within an expression a line break needs a bracket around it.
        text = f"({text}{chr(10) * (old - new)})"
    else:
        text = _as_operand(text)
    return Edit(bounds.start.index, bounds.end.index, text)


# Expressions that need brackets next to an operator, a call or an attribute.
_LOOSE = (
    ast.BoolOp,
    ast.BinOp,
    ast.UnaryOp,
    ast.Compare,
    ast.IfExp,
    ast.Lambda,
    ast.NamedExpr,
    ast.Await,
    ast.Yield,
    ast.YieldFrom,
)


def _as_operand(text: str) -> str:
    """Return ``text``, in brackets if it is an expression with another meaning next to an operator."""
    try:
        with sources.no_warnings():
            expression = ast.parse(f"({text}\n)", mode="eval").body
    except SyntaxError:  # not an expression: a statement or a keyword argument
        return text
    return f"({text})" if isinstance(expression, _LOOSE) else text
