"""Patterns of ast-grep: where one is in a function, and the edits that a rewrite makes there."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..definitions.errors import DefinitionError
from . import sources
from .edits import Edit, Unrecognised
from .memory import remembered
from .places import FunctionNode, Place, Source

if TYPE_CHECKING:
    from ast_grep_py import Rule, SgNode

    from ..definitions.changes import Rewrite, Shape

_ast_grep: Any = None
_without_ast_grep: str | None = None


def load_ast_grep() -> None:
    """Import what looks for patterns, if it is there and not imported yet: milliseconds, which known texts save.

    The engine calls it before it takes its lock, under which nothing is imported.
    """
    global _ast_grep, _without_ast_grep
    if ast_grep_is_known():
        return
    try:
        import ast_grep_py
    except ImportError as error:  # a subinterpreter, or it is not installed
        _without_ast_grep = f"ast_grep_py, which finds the code to rewrite, cannot be imported here: {error}"
    else:
        _ast_grep = ast_grep_py


def ast_grep_is_known() -> bool:
    """Whether `load_ast_grep` has been called."""
    return _ast_grep is not None or _without_ast_grep is not None


_MOST_LINES = 5  # named where a pattern is found too often
_METAVARIABLE = re.compile(r"\$+([A-Z_][A-Z0-9_]*)?")


def find_edits(rewrite: Rewrite, source: Source, place: Place) -> list[Edit]:
    """The edits that a rewrite makes in a function of ``source``.

    Raises:
        Unrecognised: the pattern does not occur exactly as often as expected, or not where expected.
    """
    edits = sorted(_edit(rewrite, match, source.text) for match in find(rewrite, source, place))
    if any(first.overlaps(second) for first, second in itertools.pairwise(edits)):
        raise Unrecognised(f"matches of {rewrite.pattern!r} in {rewrite.target} overlap")
    return edits


def find(shape: Rewrite | Shape, source: Source, place: Place) -> list[SgNode]:
    """Where the pattern is in a function of ``source``.

    Raises:
        Unrecognised: not exactly as often as expected, or not where expected.
    """
    function = _function_node(source, place)
    for at, pattern in enumerate(shape.alongside):
        if not _find_all(function, pattern):
            raise Unrecognised(why_not(shape, ("alongside", at)))
    for at, pattern in enumerate(shape.unless):
        if _find_all(function, pattern):
            raise Unrecognised(why_not(shape, ("unless", at)))
    matches = _find_all(function, shape.pattern, shape.inside)
    if len(matches) != shape.matches:
        lines = ", ".join(str(match.range().start.line + 1) for match in matches[:_MOST_LINES])
        raise Unrecognised(why_not(shape, len(matches), f" (at line {lines})" if lines else ""))
    return matches


def why_not(shape: Rewrite | Shape, found: int | Sequence[Any], lines: str = "") -> str:
    """Why a function is not recognised.

    Args:
        shape: what it was held against.
        found: how often it has the pattern; or which of ``alongside`` it does not contain, or of ``unless`` it does.
        lines: where it has the pattern.
    """
    if isinstance(found, int):
        where = f" inside {shape.inside!r}" if shape.inside is not None else ""
        times = f"{shape.pattern!r}{where} {found} times, expected {shape.matches}"
        return f"{shape.target} contains {times}{lines}{_doubt(shape.pattern if not found else None)}"
    kind, at = found
    pattern = getattr(shape, kind)[at]
    if kind == "alongside":
        return f"{shape.target} does not contain {pattern!r}{_doubt(pattern)}"
    return f"{shape.target} contains {pattern!r}, which repairs it already"


def no_python(pattern: str) -> str:
    """What is wrong with a pattern that Python does not parse; ast-grep reads of it what it can."""
    try:
        ast.parse(_METAVARIABLE.sub(lambda variable: variable[1] or "_", pattern))
    except SyntaxError as error:
        return f"is no Python by itself ({error.msg}), so it may never match"
    return ""


def _doubt(pattern: str | None) -> str:
    wrong = no_python(pattern) if pattern else ""
    return f"; the pattern {wrong}" if wrong else ""


def matches(source: Source, node: FunctionNode, pattern: str, inside: str | None = None) -> list[SgNode]:
    """Each place where a pattern occurs in a function.

    Raises:
        DefinitionError: ast-grep does not take the pattern.
    """
    return _find_all(_function_node(source, node), pattern, inside)


def _find_all(function: SgNode, pattern: str, inside: str | None = None) -> list[SgNode]:
    rule: Rule = {"pattern": pattern}
    if inside is not None:
        rule["inside"] = {"pattern": inside}
    try:
        return function.find_all(_ast_grep.Config(rule=rule))
    except UnicodeEncodeError as error:
        raise DefinitionError(f"the pattern {pattern!r} is no text in UTF-8") from error
    except RuntimeError as error:  # its text goes on with the stack of ast-grep, and of Python below it
        why = " ".join(str(error).partition("Stack backtrace")[0].rpartition(": ")[2].split()).replace(
            "\N{MICRO SIGN}", "$"
        )  # which stands for a dollar sign there
        raise DefinitionError(f"ast-grep does not take the pattern {pattern!r}: {why}") from error


def check_ast_grep() -> None:
    """Check that patterns can be looked for in this process.

    Raises:
        ImportError: they cannot; every patch that rewrites fails with it, and nothing else does.
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
    raise Unrecognised(f"ast-grep and Python disagree on where {node.name} is in {source.filename}")


def _by_line(text: str) -> dict[int, list[SgNode]]:
    found: dict[int, list[SgNode]] = {}
    for function in _ast_grep.SgRoot(text, "python").root().find_all(kind="function_definition"):
        found.setdefault(function.range().start.line + 1, []).append(function)
    return found


def _edit(rewrite: Rewrite, match: SgNode, module_text: str) -> Edit:
    def stands_for(variable: re.Match[str]) -> str:
        name = variable.group(1)
        if name in rewrite.uses:
            module, _, path = rewrite.uses[name].partition(":")
            return f'__import__("{module}", fromlist=("*",)).{path}'
        bound = match.get_match(name)
        if bound is None:
            raise Unrecognised(f"the replacement in {rewrite.target} uses ${name}, which the pattern does not bind")
        return _as_operand(bound.text())

    bounds, parent = match.range(), match.parent()
    is_statement = match.kind().endswith(("_statement", "_definition")) or (
        parent is not None and parent.kind() == "expression_statement"
    )
    template = rewrite.replacement
    if is_statement:
        # Before anything is put in: what the pattern has matched may hold a string of several lines.
        line = module_text[bounds.start.index - bounds.start.column : bounds.start.index]
        template = template.replace("\n", "\n" + line[: len(line) - len(line.lstrip())])
    text = re.sub(r"\$([A-Z_][A-Z0-9_]*)", stands_for, template)
    old, new = match.text().count("\n"), text.count("\n")
    if new > old:
        raise Unrecognised(
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


# Expressions that an operator, a call or an attribute next to them would tear apart.
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
    """``text`` in brackets if it is an expression that means something else next to an operator."""
    try:
        with sources.no_warnings():
            expression = ast.parse(f"({text}\n)", mode="eval").body
    except SyntaxError:  # no expression: a statement, a keyword argument
        return text
    return f"({text})" if isinstance(expression, _LOOSE) else text
