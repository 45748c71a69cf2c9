"""Finds the live function object of a target, and swaps its code.

Swapping ``__code__`` affects every existing reference, and one assignment undoes it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from ..guards import rewriting
from ..guards.edits import Unrecognized
from ..import_system import no_signal

_MOST_LAYERS = 64
# From Python 3.14 on, free-threaded Python stops all threads while it swaps a function's code.
_THREADS_STOP = sys.version_info >= (3, 14)


class Located(NamedTuple):
    """A function's attribute in its module: ``raw`` may wrap the function."""

    raw: Any
    owner: type | None

    @property
    def binding(self) -> str:
        """How calls bind: ``function``, ``method``, ``classmethod`` or ``staticmethod``."""
        if isinstance(self.raw, (classmethod, staticmethod)):
            return type(self.raw).__name__
        return "function" if self.owner is None else "method"


def attribute(module: ModuleType, qualname: str) -> Located:
    """Return the attribute of a qualified name, without triggering descriptors.

    Raises:
        Unrecognized: there is no such attribute, or it is inherited rather than defined there.
    """
    # Ordinary attribute access would import a lazy module.
    namespace = object.__getattribute__(module, "__dict__")
    owner: type | None = None
    value: Any = module
    for part in qualname.split("."):
        if isinstance(value, type) and part.startswith("__") and not part.endswith("__"):
            part = f"_{value.__name__.lstrip('_')}{part}"
        if part not in namespace:
            raise Unrecognized(f"{module.__name__} does not define {qualname} (no {part!r})")
        if value is not module:
            owner = value
        value = namespace[part]
        if not isinstance(value, type):
            # ray.remote replaces an actor class by an object. The object's class derives from the actor's.
            behind = inspect.getattr_static(value, "__ray_actor_class__", None)
            value = behind if isinstance(behind, type) else value
        namespace = vars(value) if isinstance(value, type) else {}
    return Located(value, owner)


def find(located: Located, expected: CodeType, originals: dict[FunctionType, CodeType], target: str) -> FunctionType:
    """Return the function behind an attribute whose code is ``expected`` (compiled from the source on disk).

    ``originals`` holds the original code of functions that are already patched.

    Raises:
        Unrecognized: no function matches, or several do; the message describes the functions that exist.
    """
    # type(), not isinstance(), which accepts a wrapt proxy around a function as the function.
    layers = list(behind(located.raw, target))
    matches = [f for f in layers if type(f) is FunctionType and is_same(originals.get(f, f.__code__), expected)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise Unrecognized(f"{target} wraps {len(matches)} functions with the same code; the one that runs is unknown")
    for function in layers:
        if type(function) is FunctionType and function.__code__.co_name == expected.co_name:
            code = function.__code__
            if code.co_filename != expected.co_filename:
                raise Unrecognized(
                    f"{target} is not the code on disk: it was replaced by {function.__module__}."
                    f"{function.__qualname__} ({code.co_filename}:{code.co_firstlineno})"
                )
            raise Unrecognized(
                f"{target} is not the code on disk: {code.co_filename} was edited after its import, or other "
                "code has changed the function"
            )
    raise Unrecognized(f"{target} is {_describe(located.raw)} that does not lead to its own function")


def is_same(code: CodeType, expected: CodeType) -> bool:
    """Whether two code objects are equal with equal lines, and with equal columns if both have columns.

    Bytecode that was compiled with PYTHONNODEBUGRANGES has no columns; other bytecode has columns.
    """
    if code == expected or not hasattr(code, "co_positions"):  # Python 3.10 has only lines
        return code == expected
    if _has_columns(code) and _has_columns(expected):
        return False
    return _lines(code) == _lines(expected) and _without_places(code) == _without_places(expected)


def _has_columns(code: CodeType) -> bool:
    return any(column is not None for _, _, column, _ in _positions(code))


def _lines(code: CodeType) -> list[int | None]:
    return [line for line, *_ in _positions(code)]


def _positions(code: CodeType) -> Iterator[tuple[int | None, int | None, int | None, int | None]]:
    from_3_11: Any = code
    yield from from_3_11.co_positions()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _positions(constant)


def _without_places(code: CodeType) -> CodeType:
    constants = (_without_places(one) if isinstance(one, CodeType) else one for one in code.co_consts)
    return code.replace(co_linetable=b"", co_consts=tuple(constants))


def reaches(raw: Any, function: FunctionType) -> bool:
    """Whether an attribute still leads to a function."""
    try:
        return any(layer is function for layer in behind(raw, ""))
    except Unrecognized:
        return False


def behind(raw: Any, target: str) -> Iterator[Any]:
    """Yield the object and everything that it wraps, outermost first."""
    waiting: list[Any] = [raw]
    seen: set[int] = set()
    while waiting and len(seen) < _MOST_LAYERS:
        layer = waiting.pop(0)
        if id(layer) in seen:
            continue
        seen.add(id(layer))
        if isinstance(layer, functools._lru_cache_wrapper):
            raise Unrecognized(f"{target} is cached with functools.lru_cache: earlier results would stay cached")
        yield layer
        if isinstance(layer, (staticmethod, classmethod)):
            waiting.append(layer.__func__)
            continue
        if isinstance(layer, property):
            waiting += [accessor for accessor in (layer.fget, layer.fset, layer.fdel) if accessor is not None]
            continue
        if isinstance(layer, (functools.partial, functools.partialmethod, functools.cached_property)):
            waiting.append(layer.func)
            continue
        wrapped = inspect.getattr_static(layer, "__wrapped__", None)
        if wrapped is not None:
            # getattr: on a proxy the static attribute is a descriptor.
            waiting.append(getattr(layer, "__wrapped__", None))
        if type(layer) is FunctionType:
            for cell in layer.__closure__ or ():
                try:
                    content = cell.cell_contents
                except ValueError:  # an empty cell
                    continue
                if isinstance(content, (FunctionType, staticmethod, classmethod, functools.partial)):
                    waiting.append(content)


def _describe(raw: Any) -> str:
    kind = type(raw)
    return f"a {kind.__module__}.{kind.__qualname__}" if kind.__module__ != "builtins" else f"a {kind.__name__}"


def parameters(code: CodeType) -> tuple[str, ...]:
    """Return all parameter names, including ``args`` and ``kwargs``."""
    flags = code.co_flags
    stars = bool(flags & inspect.CO_VARARGS) + bool(flags & inspect.CO_VARKEYWORDS)
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + stars]


def check_swap(function: FunctionType, code: CodeType) -> None:
    """Check that ``code`` can replace the function's code.

    Raises:
        Unrecognized: it cannot (`rewriting.check_swap`), or threads may call the function during the swap.
    """
    if not _THREADS_STOP and not getattr(sys, "_is_gil_enabled", lambda: True)():
        raise Unrecognized("free-threaded Python before 3.14 cannot change a function safely; PYTHON_GIL=1 permits it")
    rewriting.check_swap(function.__code__, code, function.__qualname__)


def in_dynamo_cache(function: FunctionType) -> bool:
    """Whether torch.compile has compiled code for this function (inlined functions are not detected)."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    entries = getattr(dynamo, "_debug_get_cache_entry_list", None)
    if entries is None:
        return False
    try:
        return bool(entries(function.__code__))
    except no_signal(Exception):
        return False
