"""Rewrites: find a pattern in one function's text, edit it, compile the module, take the function's code.

Compiling the whole module, or the slice of it that is known to give the same code (`slices`), gives future imports,
closures, ``__class__`` cells, private names and decorators their right meaning for free. Edits keep the number of
lines, so tracebacks and breakpoints stay right, and after compiling we check that no other function's code came out
different.
"""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..definitions.errors import DefinitionError
from ..import_system import no_signal
from . import entry, slices, sources
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


class Unrecognised(Exception):
    """The code is not what the patch was written for; the message says what is missing."""


class Undefined(Exception):
    """The edited code would use a name that nothing defines, and raise NameError in the middle of training."""


class NoEffect(Exception):
    """Under ``python -O`` the code to be repaired (an assertion) is not compiled, so there is nothing to repair."""


class Edit(NamedTuple):
    """Characters ``start`` to ``end`` of a module's text become ``text``."""

    start: int
    end: int
    text: str

    def overlaps(self, other: Edit) -> bool:
        """Whether the two touch the same characters."""
        return self.start < other.end and other.start < self.end


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
    for candidate in sources.remembered(("nodes", source.text), lambda: _by_line(source.text)).get(node.lineno, ()):
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


def with_edits(text: str, edits: Iterable[Edit]) -> str:
    """``text`` with all edits made."""
    for edit in sorted(edits, reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text


def edited(text: str, edits: Sequence[Edit]) -> str:
    """``text`` with all edits made; the number of lines stays the same."""
    result = with_edits(text, edits)
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
    except no_signal(SyntaxError, ValueError, RecursionError) as error:
        raise Unrecognised(f"the code does not compile: {error} ({filename})") from error


def compile_around(source: Source, place: Place, edits: Sequence[Edit] = (), first: str = "") -> CodeType:
    """Compile of an edited module what a function takes: its slice if it has one, else all.

    Args:
        source: the module.
        place: the function.
        edits: those of the text.
        first: a statement that is put first into the function (`entry`).

    Raises:
        Unrecognised: it does not compile, or has another number of lines.
    """
    text = source.text
    if place.slice is not None:
        lines, above = sources.lines_of(source), place.first_line - 1
        kept = slices.cut(lines, place)
        less = len("\n".join(lines[:above])) - len("\n".join(kept[:above])) if edits else 0
        text, edits = "\n".join(kept), [Edit(edit.start - less, edit.end - less, edit.text) for edit in edits]
    text = edited(text, edits)
    if not first:
        return compile_module(text, source.filename)
    try:
        return entry.compiled(text, source.filename, place.name, place.lineno, first)
    except no_signal(SyntaxError, ValueError, RecursionError) as error:
        raise Unrecognised(f"the code does not compile: {error} ({source.filename})") from error


def entered_code(source: Source, place: Place, edits: Sequence[Edit], first: str, original: CodeType) -> CodeType:
    """A function's code after edits that `rewrite_code` has shown to be good, with a statement put first.

    Raises:
        Unrecognised: it does not compile, or cannot take the place of the original.
    """
    code = code_of(compile_around(source, place, edits, first), place)
    check_swap(original, code, place.name)
    return code


def code_of(module_code: CodeType, place: Place) -> CodeType:
    """The code object of a function within its module's."""
    name, line = place.name, place.first_line
    found = [code for code in _nested(module_code) if code.co_name == name and code.co_firstlineno == line]
    if len(found) != 1:
        raise Unrecognised(f"{name} in line {line} has {len(found)} code objects, expected 1")
    return found[0]


def _nested(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _nested(constant)


Edited = tuple[Place, Sequence[Edit]]


def rewrite_code(source: Source, place: Place, edits: Sequence[Edit], beside: Sequence[Edited] = ()) -> CodeType:
    """The function's code after the edits, shown to be the only code in the module that differs.

    Args:
        source: the module.
        place: the function.
        edits: those within it.
        beside: other functions that are rewritten too, so that the module is compiled once for all of them.

    Raises:
        Unrecognised: the edited text does not compile, the edits reach beyond the function, or its new code cannot take
            the place of the old.
        Undefined: the edited code uses a name that nothing defines.
        NoEffect: the edits are in assertions, and this interpreter leaves those out.
    """
    beside = beside if place.slice is None else ()  # not in this slice
    others = [edit for _, theirs in beside for edit in theirs]
    before, after = compile_around(source, place), compile_around(source, place, [*edits, *others])
    target = code_of(before, place)
    replaced = code_of(after, place)
    different = list(_differing(before, after))
    own = [target, *_nested(target)]
    theirs = [one for other, _ in beside for code in [code_of(before, other)] for one in (code, *_nested(code))]
    for code in different:
        if not any(code is one for one in (*own, *theirs)):
            names = " and ".join(dict.fromkeys(one.name for one in (place, *(other for other, _ in beside))))
            raise Unrecognised(f"the edits of {names} would also change {code.co_name} in {source.filename}")
    if not any(code is one for code in different for one in own):
        if sys.flags.optimize:
            raise NoEffect(f"under python -O there is no assertion in {place.name} that could fail")
        raise Unrecognised(f"the edits do not change what {place.name} does")
    check_swap(target, replaced, place.name)
    if place.slice is None:  # of what is known this is known too
        _check_names(before, target, replaced)
    return replaced


_KIND = (
    inspect.CO_GENERATOR
    | inspect.CO_COROUTINE
    | inspect.CO_ASYNC_GENERATOR
    | inspect.CO_VARARGS
    | inspect.CO_VARKEYWORDS
)


def check_swap(old: CodeType, new: CodeType, name: str) -> None:
    """Check that the new code of a function can take the place of the old.

    Raises:
        Unrecognised: free variables, parameters or the kind of function differ. CPython itself checks only the
            number of free variables, and would bind the wrong cells in silence.
    """
    for what, before, after in (
        ("free variables", old.co_freevars, new.co_freevars),
        ("parameters", _parameter_names(old), _parameter_names(new)),
        ("kind (generator, coroutine, *args, **kwargs)", old.co_flags & _KIND, new.co_flags & _KIND),
    ):
        if before != after:
            raise Unrecognised(f"the new code of {name} has other {what}: {after} instead of {before}")


def _parameter_names(code: CodeType) -> tuple[object, ...]:
    count = code.co_argcount + code.co_kwonlyargcount
    return code.co_posonlyargcount, code.co_argcount, code.co_varnames[:count]


# What the import system puts into a module.
_GIVEN = {"__name__", "__doc__", "__package__", "__loader__", "__spec__", "__file__", "__path__", "__builtins__"}


def _check_names(module: CodeType, old: CodeType, new: CodeType) -> None:
    """Check that the new code of a function looks up no global name that is new to it and that nothing defines.

    Raises:
        Undefined: it does.
    """
    added = {name for code in (new, *_nested(new)) for name in code.co_names} - _GIVEN - set(dir(builtins))
    if added:  # most of these are attributes, so it is worth a closer look only now
        added &= _loaded(new) - _loaded(old)
    if added and not _takes_in_unseen_names(module):
        added -= _stored(module) | _stored(new)
        if added:
            names = ", ".join(sorted(added))
            raise Undefined(f"the new code of {new.co_name} uses {names}, which neither it nor its module defines")


def _takes_in_unseen_names(module: CodeType) -> bool:
    if ("*",) in module.co_consts or not {"vars", "exec", "setattr", "__dict__"}.isdisjoint(module.co_names):
        return True
    return any("globals" in code.co_names for code in (module, *_nested(module)))


def _loaded(code: CodeType) -> set[str]:
    """The global names that a function looks up, and what is within it."""
    found: dict[str, set[str]] = {}
    for each in dis.get_instructions(code):
        found.setdefault(each.opname, set()).add(each.argval if isinstance(each.argval, str) else "")
    # A class body has names of its own.
    names = found.get("LOAD_NAME", set()) | found.get("LOAD_FROM_DICT_OR_GLOBALS", set())
    names = (names - found.get("STORE_NAME", set())) | found.get("LOAD_GLOBAL", set())
    return names.union(*(_loaded(nested) for nested in code.co_consts if isinstance(nested, CodeType)))


def _stored(code: CodeType) -> set[str]:
    """The names that a module gives a value, or that a function declares global and does."""
    own = ("STORE_GLOBAL",) if code.co_flags & inspect.CO_OPTIMIZED else ("STORE_GLOBAL", "STORE_NAME")
    found = {str(each.argval) for each in dis.get_instructions(code) if each.opname in own}
    for nested in _nested(code):
        found |= {str(each.argval) for each in dis.get_instructions(nested) if each.opname == "STORE_GLOBAL"}
    return found


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
