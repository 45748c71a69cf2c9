"""Rewrites: compile the edited module, and take the function's code.

Compiling the whole module, or the slice of it that is known to give the same code (`slices`), preserves the meaning of
future imports, closures, ``__class__`` cells, private names and decorators. Edits keep the number of lines, so
tracebacks and breakpoints are not affected. After compiling, a check ensures that no other function's code differs.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import sys
from collections.abc import Iterator, Sequence
from types import CodeType

from ..import_system import no_signal
from . import entry, slices, sources
from .edits import Edit, NoEffect, Undefined, Unrecognized, edited
from .memory import remembered
from .places import Place, Source


def compile_module(text: str, filename: str) -> CodeType:
    """Compile a module's text as the import system does.

    Raises:
        Unrecognized: it does not compile.
    """
    return remembered(("code", text, filename), lambda: _compile(text, filename))


def _compile(text: str, filename: str) -> CodeType:
    try:
        # dont_inherit: this file's future imports must not affect the framework's code.
        with sources.no_warnings():
            return compile(text, filename, "exec", dont_inherit=True)
    except no_signal(SyntaxError, ValueError, RecursionError) as error:
        raise Unrecognized(f"the code does not compile: {error} ({filename})") from error


def compile_around(source: Source, place: Place, edits: Sequence[Edit] = (), first: str = "") -> CodeType:
    """Compile an edited module for a function: its slice if it has one, else the whole module.

    Args:
        source: the module.
        place: the function.
        edits: the edits of the text.
        first: a statement to insert at the beginning of the function (`entry`).

    Raises:
        Unrecognized: it does not compile, or the number of lines changes.
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
        raise Unrecognized(f"the code does not compile: {error} ({source.filename})") from error


def entered_code(source: Source, place: Place, edits: Sequence[Edit], first: str, original: CodeType) -> CodeType:
    """Return a function's code after edits that `rewrite_code` has checked, with a first statement inserted.

    Raises:
        Unrecognized: it does not compile, or cannot replace the original.
    """
    code = code_of(compile_around(source, place, edits, first), place)
    check_swap(original, code, place.name)
    return code


def code_of(module_code: CodeType, place: Place) -> CodeType:
    """Return the code object of a function within its module's code."""
    name, line = place.name, place.first_line
    matches = [code for code in _nested(module_code) if code.co_name == name and code.co_firstlineno == line]
    if len(matches) != 1:
        raise Unrecognized(f"{name} in line {line} has {len(matches)} code objects, expected 1")
    return matches[0]


def _nested(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _nested(constant)


Edited = tuple[Place, Sequence[Edit]]


def rewrite_code(source: Source, place: Place, edits: Sequence[Edit], beside: Sequence[Edited] = ()) -> CodeType:
    """Return the function's code after the edits, and check that no other code in the module differs.

    Args:
        source: the module.
        place: the function.
        edits: the edits of the function.
        beside: other functions that are also rewritten, so that the module is compiled once for all of them.

    Raises:
        Unrecognized: the edited text does not compile, the edits affect other code, or the new code cannot replace
            the old.
        Undefined: the edited code uses an undefined name.
        NoEffect: the edits are in assertions, which this interpreter leaves out.
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
            raise Unrecognized(f"the edits of {names} would also change {code.co_name} in {source.filename}")
    if not any(code is one for code in different for one in own):
        if sys.flags.optimize:
            raise NoEffect(f"under python -O there is no assertion in {place.name} that could fail")
        raise Unrecognized(f"the edits do not change what {place.name} does")
    check_swap(target, replaced, place.name)
    if place.slice is None:  # already checked for known texts
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
    """Check that the new code of a function can replace the old.

    Raises:
        Unrecognized: free variables, parameters or the kind of function differ. CPython itself checks only the
            number of free variables, and would silently bind the wrong cells.
    """
    for what, before, after in (
        ("free variables", old.co_freevars, new.co_freevars),
        ("parameters", _parameter_names(old), _parameter_names(new)),
        ("kind (generator, coroutine, *args, **kwargs)", old.co_flags & _KIND, new.co_flags & _KIND),
    ):
        if before != after:
            raise Unrecognized(f"the new code of {name} has other {what}: {after} instead of {before}")


def _parameter_names(code: CodeType) -> tuple[object, ...]:
    count = code.co_argcount + code.co_kwonlyargcount
    return code.co_posonlyargcount, code.co_argcount, code.co_varnames[:count]


# Names that the import system adds to a module.
_GIVEN = {"__name__", "__doc__", "__package__", "__loader__", "__spec__", "__file__", "__path__", "__builtins__"}


def _check_names(module: CodeType, old: CodeType, new: CodeType) -> None:
    """Check that the new code of a function looks up no new and undefined global name.

    Raises:
        Undefined: it does.
    """
    added = {name for code in (new, *_nested(new)) for name in code.co_names} - _GIVEN - set(dir(builtins))
    if added:  # most of these are attributes, so check them closely only now
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
    """Return the global names that a function and its nested code look up."""
    by_opcode: dict[str, set[str]] = {}
    for each in dis.get_instructions(code):
        by_opcode.setdefault(each.opname, set()).add(each.argval if isinstance(each.argval, str) else "")
    # A class body has its own names.
    names = by_opcode.get("LOAD_NAME", set()) | by_opcode.get("LOAD_FROM_DICT_OR_GLOBALS", set())
    names = (names - by_opcode.get("STORE_NAME", set())) | by_opcode.get("LOAD_GLOBAL", set())
    return names.union(*(_loaded(nested) for nested in code.co_consts if isinstance(nested, CodeType)))


def _stored(code: CodeType) -> set[str]:
    """Return the names that a module assigns, or that a function declares global and assigns."""
    own = ("STORE_GLOBAL",) if code.co_flags & inspect.CO_OPTIMIZED else ("STORE_GLOBAL", "STORE_NAME")
    names = {str(each.argval) for each in dis.get_instructions(code) if each.opname in own}
    for nested in _nested(code):
        names |= {str(each.argval) for each in dis.get_instructions(nested) if each.opname == "STORE_GLOBAL"}
    return names


def check_lines(source: Source, edits: Sequence[Edit]) -> None:
    """Check that all code outside the edits keeps its line.

    Raises:
        Unrecognized: code has moved.
    """
    touched: set[int] = set()
    for edit in edits:
        first = source.text.count("\n", 0, edit.start) + 1
        touched.update(range(first, first + source.text.count("\n", edit.start, edit.end) + 1))
    new = edited(source.text, edits)
    before = _lines(compile_module(source.text, source.filename))
    after = _lines(compile_module(new, source.filename))
    # Also by text: code that moves within one function leaves the same function on the same lines.
    pairs = zip(source.text.split("\n"), new.split("\n"), strict=True)
    moved = [number for number, (one, other) in enumerate(pairs, 1) if one != other and number not in touched]
    moved += sorted(line for line, _ in set(before.items()) ^ set(after.items()) if line not in touched)
    if moved:
        raise Unrecognized(f"the edits would move code in line {moved[0]} of {source.filename}")


def _lines(module_code: CodeType) -> dict[int, frozenset[str]]:
    """Return, for each line, the names of the functions that have code on it."""
    by_line: dict[int, set[str]] = {}
    for code in [module_code, *_nested(module_code)]:
        for _, _, line in code.co_lines():
            if line is not None:
                by_line.setdefault(line, set()).add(code.co_name)
    return {line: frozenset(names) for line, names in by_line.items()}


def _differing(before: CodeType, after: CodeType) -> Iterator[CodeType]:
    """Yield the code objects of ``before`` whose own instructions or constants differ in ``after``."""
    if before == after:
        return
    if _shell(before) != _shell(after):
        yield before
        return
    for old, new in zip(before.co_consts, after.co_consts, strict=True):
        if isinstance(old, CodeType):
            yield from _differing(old, new)


def _shell(code: CodeType) -> CodeType:
    # Without positions: a class's position ends with its last method, so an edit there would count.
    return code.replace(
        co_consts=tuple(None if isinstance(c, CodeType) else c for c in code.co_consts), co_linetable=b""
    )
