"""Rewrites: compile the edited module, and take the function's code.

Compiling the whole module, or the slice of it that is known to give the same code (`slices`), gives future imports,
closures, ``__class__`` cells, private names and decorators their right meaning for free. Edits keep the number of
lines, so tracebacks and breakpoints stay right, and after compiling we check that no other function's code came out
different.
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
from .edits import Edit, NoEffect, Undefined, Unrecognised, edited
from .memory import remembered
from .places import Place, Source


def compile_module(text: str, filename: str) -> CodeType:
    """Compile a module's text as the import system does.

    Raises:
        Unrecognised: it does not compile.
    """
    return remembered(("code", text, filename), lambda: _compile(text, filename))


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
