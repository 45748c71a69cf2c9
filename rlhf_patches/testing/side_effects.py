"""Check that a call does not change a user's objects: their classes, identities and attributes.

No framework is imported: torch and numpy are used only if an object's class has imported them.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import enum
import logging
import pathlib
import re
import reprlib
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

_PLAIN = (
    *(int, float, complex, str, bytes, type(None), type(...), range, re.Pattern, pathlib.PurePath, enum.Enum),
    *(datetime.date, datetime.time, datetime.timedelta),
)
"""Compared by value: assigning an equal value is no change."""

_CLOSED = (
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.GeneratorType),
    *(weakref.ref, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet, logging.Logger),
)
"""Compared by identity, without their contents: they are not the user's, or change by themselves."""

_SHOWN = 20
"""The most differences in a message."""


@dataclass(frozen=True)
class _Seen:
    path: str
    object: Any  # kept, so that no other object can get its id
    type: type
    below: dict[Hashable, tuple[str, Any]]
    contents: Any


def untouched(
    *objects: object, changes: tuple[str, ...] = (), contents: bool = False, depth: int = 30
) -> contextlib.AbstractContextManager[None]:
    """A context in which a user's objects must not change: trainer, model, optimizer, dataset, arguments.

        with untouched(trainer, changes=("trainer.state.global_step", "*.optimizer.state*")):
            trainer.training_step(model, batch)

    Attributes (``__dict__`` and ``__slots__``), submodules, parameters, buffers, hooks, and the contents of
    dictionaries, lists, tuples and sets are followed, each object once. Each object must keep its class and the
    identity of the objects that it holds; numbers, texts and similar values are compared by value. For a tensor,
    ``requires_grad``, shape, dtype, device and hooks are compared. If the body raises, nothing is checked and the
    exception propagates.

    Args:
        objects: the objects to check. A path begins with the caller's name for the object, or else with its class.
        changes: paths, as in messages, that the body may change itself; ``*`` matches any characters.
            Objects below such a path are not checked.
        contents: whether tensors and arrays must keep their values, and parameters their gradients.
        depth: how far to follow. Each object is reached by its shortest path.

    Raises:
        AssertionError: an object was replaced, added or removed, or has another class or value; with its path.
    """
    __tracebackhide__ = True
    if isinstance(changes, str):
        raise TypeError(f"changes is {changes!r}: expected a tuple of paths, such as ({changes!r},)")
    caller = sys._getframe(1)
    names = {id(value): name for space in (caller.f_globals, caller.f_locals) for name, value in space.items()}
    roots = [(names.get(id(each), type(each).__name__), each) for each in objects]
    may = re.compile("|".join(".*".join(map(re.escape, glob.split("*"))) for glob in changes) or r"(?!)", re.DOTALL)

    def allowed(path: str) -> bool:
        return may.fullmatch(path) is not None

    return _checked(roots, allowed, contents, depth)


@contextlib.contextmanager
def _checked(
    roots: list[tuple[str, object]], allowed: Callable[[str], bool], contents: bool, depth: int
) -> Iterator[None]:
    __tracebackhide__ = True
    before = _walk(roots, allowed, contents, depth)
    yield
    differences = [line for each in before for line in _differences(each, allowed, contents)]
    if differences:
        more = [f"and {len(differences) - _SHOWN} more"] if len(differences) > _SHOWN else []
        raise AssertionError("\n".join([*differences[:_SHOWN], *more]))


def _walk(roots: list[tuple[str, object]], allowed: Callable[[str], bool], contents: bool, depth: int) -> list[_Seen]:
    """Every reached object with contents, nearest first."""
    seen: dict[int, _Seen] = {}
    due = collections.deque((path, root, 0) for path, root in roots if not allowed(path))
    while due:
        path, thing, far = due.popleft()
        if id(thing) in seen or not _is_open(thing):
            continue
        below = {key: (path + edge, value) for key, edge, value in _below(thing) if not allowed(path + edge)}
        seen[id(thing)] = _Seen(path, thing, type(thing), below, _contents(thing) if contents else None)
        if far < depth:
            due.extend((name, value, far + 1) for name, value in below.values())
    return list(seen.values())


def _differences(was: _Seen, allowed: Callable[[str], bool], contents: bool) -> Iterator[str]:
    if type(was.object) is not was.type:
        yield f"{was.path} has another class: {was.type.__name__} before, {type(was.object).__name__} now"
    now = {key: (was.path + edge, value) for key, edge, value in _below(was.object) if not allowed(was.path + edge)}
    for key, (path, value) in was.below.items():
        if key not in now:
            yield f"{path} is gone: {_shown(value)} before"
        elif not _same(value, now[key][1]):
            other = now[key][1]
            if _is_plain(value) or _is_plain(other) or type(value) is tuple is type(other):
                yield f"{path} has changed: {_shown(value)} before, {_shown(other)} now"
            else:
                yield f"{path} is another object: {type(value).__name__} before, {type(other).__name__} now"
    for key, (path, value) in now.items():
        if key not in was.below:
            yield f"{path} is new: {_shown(value)}"
    if contents and not _equal(was.contents, _contents(was.object)):
        yield f"{was.path} has different contents"


def _below(thing: Any) -> Iterator[tuple[Hashable, str, Any]]:
    """The contents of an object: for each a key, the part of the path, and the object."""
    kind = type(thing)
    if issubclass(kind, dict):
        for key, value in list(dict.items(thing)):
            yield ("[]", _identity(key)), f"[{_shown(key)}]", value
    elif issubclass(kind, (list, tuple, collections.deque)):
        for number, value in enumerate(_items(thing)):
            yield ("[]", number), f"[{number}]", value
    elif issubclass(kind, (set, frozenset)):
        for value in list(thing):
            yield ("{}", _identity(value)), f"{{{_shown(value)}}}", value
    if _is_tensor(thing):
        for name in ("requires_grad", "shape", "dtype", "device", "_backward_hooks", "_post_accumulate_grad_hooks"):
            yield (".", name), f".{name}", getattr(thing, name, None)
    own = _dictionary(thing)
    flat = ("_modules", "_parameters", "_buffers") if _is_torch(thing, "nn.Module") else ()
    for name, value in list(own.items()):
        if name not in flat or not isinstance(value, dict):
            yield (".", name), f".{name}", value
            continue
        yield (".", name), f".{name}", _Itself(value)  # users write `model.layer`
        for inner, child in list(dict.items(value)):
            yield (name, inner), f".{inner}", child
    for owner in kind.__mro__:
        for name, member in vars(owner).items() if "__slots__" in vars(owner) else ():
            if isinstance(member, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):
                    yield (".", name), f".{name}", member.__get__(thing, kind)


class _Itself:
    """A dictionary whose identity counts; its contents are compared separately."""

    __slots__ = ("held",)

    def __init__(self, held: object) -> None:
        self.held = held


def _items(thing: Any) -> list[Any]:
    (base,) = (each for each in (list, tuple, collections.deque) if issubclass(type(thing), each))
    return list(base.__iter__(thing))  # not a method of the object's own class


def _dictionary(thing: object) -> dict[str, Any]:
    try:
        attributes = object.__getattribute__(thing, "__dict__")
    except (AttributeError, TypeError):
        return {}
    return attributes if isinstance(attributes, dict) else {}


def _is_open(thing: object) -> bool:
    return not issubclass(type(thing), (*_CLOSED, _Itself)) and not _is_plain(thing)


def _is_plain(thing: object) -> bool:
    return (
        issubclass(type(thing), _PLAIN)
        or any(_is_torch(thing, name) for name in ("dtype", "device", "Size"))
        or _is_numpy(thing, "generic")
    )


def _same(before: Any, after: Any) -> bool:
    if before is after:
        return True
    if type(before) is not type(after):
        return False
    if isinstance(before, _Itself):
        return before.held is after.held
    if _is_plain(before):
        return bool(before == after) or bool(before != before and after != after)  # NaN
    if isinstance(before, tuple):  # equal tuples cannot be distinguished
        return len(before) == len(after) and all(map(_same, _items(before), _items(after)))
    return False


def _identity(thing: object) -> Hashable:
    return (type(thing), thing) if _is_plain(thing) and isinstance(thing, Hashable) else id(thing)


def _shown(thing: object) -> str:
    return reprlib.repr(thing) if _is_plain(thing) or type(thing) is tuple else type(thing).__name__


def _contents(thing: Any) -> Any:
    """A copy of the values and the gradient; None for objects without values."""
    if _is_tensor(thing) and not thing.is_meta:
        return _copy(thing), _copy(thing.grad) if thing.is_leaf and thing.grad is not None else None
    return (thing.copy(), None) if _is_numpy(thing, "ndarray") else None


def _copy(tensor: Any) -> Any:
    detached = tensor.detach()
    return detached.clone() if detached.layout is sys.modules["torch"].strided else detached.to_dense()


def _equal(before: Any, after: Any) -> bool:
    if before is None or after is None:
        return before is after
    return all(_alike(one, other) for one, other in zip(before, after, strict=True))


def _alike(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    if _is_tensor(one) and one.device != other.device:
        return False
    equal = (one == other) | ((one != one) & (other != other))  # NaN
    return bool(equal.all())


def _is_tensor(thing: object) -> bool:
    return _is_torch(thing, "Tensor")


def _is_torch(thing: object, name: str) -> bool:
    return _is_one_of("torch", thing, name)


def _is_numpy(thing: object, name: str) -> bool:
    return _is_one_of("numpy", thing, name)


def _is_one_of(package: str, thing: object, name: str) -> bool:
    """Whether the object's class is one of an already imported package."""
    cls: Any = sys.modules.get(package)
    for part in name.split("."):
        cls = getattr(cls, part, None)
    return isinstance(cls, type) and issubclass(type(thing), cls)
