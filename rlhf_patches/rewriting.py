"""Rewrites: find a pattern in one function's text, edit it, compile the whole module, take the function's code.

Compiling the whole module gives future imports, closures, ``__class__`` cells, private names and decorators
their right meaning for free. Edits keep the number of lines, so tracebacks and breakpoints stay right, and
after compiling we check that no other function's code came out different.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType

from . import sources
from .sources import Source
from .vocabulary import Rewrite

try:
    from ast_grep_py import Config, Rule, SgNode, SgRoot
except ImportError as error:  # a subinterpreter, or it is not installed
    _without_ast_grep: str | None = f"ast_grep_py, which finds the code to rewrite, cannot be imported here: {error}"
else:
    _without_ast_grep = None


class Unrecognised(Exception):
    """The code is not what the patch was written for; the message says what is missing."""


class NoEffect(Exception):
    """Under ``python -O`` the code to be repaired (an assertion) is not compiled, so there is nothing to repair."""


@dataclass(frozen=True, order=True)
class Edit:
    """Characters ``start`` to ``end`` of a module's text become ``text``."""

    start: int
    end: int
    text: str

    def overlaps(self, other: Edit) -> bool:
        """Whether the two touch the same characters."""
        return self.start < other.end and other.start < self.end


def find_edits(rewrite: Rewrite, source: Source, node: sources.FunctionNode) -> list[Edit]:
    """The edits that a rewrite makes in the function ``node`` of ``source``.

    Raises:
        Unrecognised: the pattern does not occur exactly as often as expected, or not where expected.
    """
    function = _function_node(source, node)
    for pattern in rewrite.alongside:
        if not function.find_all(pattern=pattern):
            raise Unrecognised(f"{rewrite.target} does not contain {pattern!r}")
    for pattern in rewrite.unless:
        if function.find_all(pattern=pattern):
            raise Unrecognised(f"{rewrite.target} contains {pattern!r}, which repairs it already")
    rule: Rule = {"pattern": rewrite.pattern}
    if rewrite.inside is not None:
        rule["inside"] = {"pattern": rewrite.inside}
    matches = function.find_all(Config(rule=rule))
    if len(matches) != rewrite.matches:
        where = f" inside {rewrite.inside!r}" if rewrite.inside is not None else ""
        raise Unrecognised(
            f"{rewrite.target} contains {rewrite.pattern!r}{where} {len(matches)} times, expected {rewrite.matches}"
        )
    edits = sorted(_edit(rewrite, match, source.text) for match in matches)
    if any(first.overlaps(second) for first, second in itertools.pairwise(edits)):
        raise Unrecognised(f"matches of {rewrite.pattern!r} in {rewrite.target} overlap")
    return edits


def check_ast_grep() -> None:
    """Check that patterns can be looked for in this process.

    Raises:
        ImportError: they cannot; every patch that rewrites fails with it, and nothing else does.
    """
    if _without_ast_grep is not None:
        raise ImportError(_without_ast_grep)


def _function_node(source: Source, node: sources.FunctionNode) -> SgNode:
    check_ast_grep()
    for candidate in sources.remembered(("nodes", source.text), lambda: _by_line(source.text)).get(node.lineno, ()):
        name = candidate.field("name")
        if name is not None and name.text() == node.name:
            return candidate
    raise Unrecognised(f"ast-grep and Python disagree on where {node.name} is in {source.filename}")


def _by_line(text: str) -> dict[int, list[SgNode]]:
    found: dict[int, list[SgNode]] = {}
    for function in SgRoot(text, "python").root().find_all(kind="function_definition"):
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


def edited(text: str, edits: Sequence[Edit]) -> str:
    """``text`` with all edits made; the number of lines stays the same."""
    result = text
    for edit in sorted(edits, reverse=True):
        result = result[: edit.start] + edit.text + result[edit.end :]
    if result.count("\n") != text.count("\n"):  # not an assert: under -O it would be gone
        raise Unrecognised("the edits change the number of lines")
    return result


def compile_module(text: str, filename: str) -> CodeType:
    """Compile a module's text as the import system does.

    Raises:
        Unrecognised: it does not compile.
    """
    return sources.remembered(("code", text, filename), lambda: _compile(text, filename))


def _compile(text: str, filename: str) -> CodeType:
    try:
        # dont_inherit: this file's own future imports must not leak into the framework's code.
        with sources.no_warnings():
            return compile(text, filename, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise Unrecognised(f"the code does not compile: {error} ({filename})") from error


def code_of(module_code: CodeType, node: sources.FunctionNode) -> CodeType:
    """The code object of the function ``node`` within its module's."""
    line = sources.first_line(node)
    found = [code for code in _nested(module_code) if code.co_name == node.name and code.co_firstlineno == line]
    if len(found) != 1:
        raise Unrecognised(f"{node.name} in line {line} has {len(found)} code objects, expected 1")
    return found[0]


def _nested(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _nested(constant)


def rewrite_code(source: Source, node: sources.FunctionNode, edits: Sequence[Edit]) -> CodeType:
    """The function's code after the edits, shown to be the only code in the module that differs.

    Raises:
        Unrecognised: the edited text does not compile, or the edits reach beyond the function.
        NoEffect: the edits are in assertions, and this interpreter leaves those out.
    """
    before = compile_module(source.text, source.filename)
    after = compile_module(edited(source.text, edits), source.filename)
    target = code_of(before, node)
    replaced = code_of(after, node)
    different = list(_differing(before, after))
    if not different:
        if sys.flags.optimize:
            raise NoEffect(f"under python -O there is no assertion in {node.name} that could fail")
        raise Unrecognised(f"the edits do not change what {node.name} does")
    own = [target, *_nested(target)]
    for code in different:
        if not any(code is one for one in own):
            raise Unrecognised(f"the edits of {node.name} would also change {code.co_name} in {source.filename}")
    return replaced


def check_lines(source: Source, edits: Sequence[Edit]) -> None:
    """Check that everything outside the edits still runs on the line on which it stands in the file.

    Raises:
        Unrecognised: something has moved.
    """
    touched: set[int] = set()
    for edit in edits:
        first = source.text.count("\n", 0, edit.start) + 1
        touched.update(range(first, first + source.text.count("\n", edit.start, edit.end) + 1))
    new = edited(source.text, edits)
    before = _lines(compile_module(source.text, source.filename))
    after = _lines(compile_module(new, source.filename))
    # By text too: code that moves within one function leaves the same function on the same lines.
    pairs = zip(source.text.split("\n"), new.split("\n"), strict=True)
    moved = [number for number, (one, other) in enumerate(pairs, 1) if one != other and number not in touched]
    moved += sorted(line for line, _ in set(before.items()) ^ set(after.items()) if line not in touched)
    if moved:
        raise Unrecognised(f"the edits would move code in line {moved[0]} of {source.filename}")


def _lines(module_code: CodeType) -> dict[int, frozenset[str]]:
    """Per line the names of the functions that have code on it."""
    found: dict[int, set[str]] = {}
    for code in [module_code, *_nested(module_code)]:
        for _, _, line in code.co_lines():
            if line is not None:
                found.setdefault(line, set()).add(code.co_name)
    return {line: frozenset(names) for line, names in found.items()}


def _differing(before: CodeType, after: CodeType) -> Iterator[CodeType]:
    """The code objects of ``before`` whose own instructions or constants differ in ``after``."""
    if before == after:
        return
    if _shell(before) != _shell(after):
        yield before
        return
    for old, new in zip(before.co_consts, after.co_consts, strict=True):
        if isinstance(old, CodeType):
            yield from _differing(old, new)


def _shell(code: CodeType) -> CodeType:
    # Without positions: that of a class ends where its last method does, so an edit there would count.
    return code.replace(
        co_consts=tuple(None if isinstance(c, CodeType) else c for c in code.co_consts), co_linetable=b""
    )
