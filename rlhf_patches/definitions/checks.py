"""Shared checks of definitions: names, paths and field types; each message states the expected value."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from .errors import DefinitionError

_Kind = TypeVar("_Kind", bound=type)

_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)+")
MODULE = "<module>"
"""Python's name for the code of a module, also in tracebacks: ``module:<module>``."""
_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_OF_A_MODULE = re.compile(rf"[^\W\d]\w*(\.[^\W\d]\w*)*:{MODULE}")


def check_name(name: object, what: str) -> None:
    """Check the name of a patch or an advice; ``what`` names it in the message.

    Raises:
        DefinitionError: it is not kebab-case.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise DefinitionError(
            f"{what} is {shown(name)}: expected kebab-case, framework first, at least two words ('trl-some-bug')"
        )


def check_path(path: str, what: str) -> None:
    """Check the path of a function, ``module:qualified.name``; ``what`` names it in the message.

    Raises:
        DefinitionError: it is not such a path.
    """
    if not isinstance(path, str) or not _PATH.fullmatch(path):
        raise DefinitionError(
            f"{what} is {shown(path)}: expected 'module:qualified.name', such as 'pkg.mod:Class.method'"
        )


def of_a_module(path: object) -> bool:
    """Whether a path is a module's own code, ``module:<module>``."""
    return isinstance(path, str) and _OF_A_MODULE.fullmatch(path) is not None


_LONGEST = 100  # characters of a wrong value in a message


def shown(value: object) -> str:
    """Return a wrong value for a message."""
    try:
        text = repr(value)
    except Exception:
        text = f"an object of type {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


_TYPES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "str": (lambda value: isinstance(value, str), "text"),
    "str | None": (lambda value: value is None or isinstance(value, str), "text, or None"),
    "int": (lambda value: type(value) is int, "a whole number"),
    "bool": (lambda value: type(value) is bool, "True or False"),
    "tuple[str, ...]": (
        lambda value: isinstance(value, tuple) and all(isinstance(item, str) for item in value),
        "a tuple of strings, such as ('one',)",
    ),
    "Mapping[str, str]": (
        lambda value: isinstance(value, Mapping) and all(isinstance(item, str) for item in value.values()),
        "a dictionary of strings",
    ),
}
"""Annotations, the checks of their values, and the expected types in words. Other fields are checked by name."""


def check_types(described: Any, owner: str) -> None:
    """Check the fields of a dataclass that have annotations in `_TYPES`; ``owner`` begins the message.

    Raises:
        DefinitionError: a field has another type.
    """
    for each in fields(described):
        holds, expected = _TYPES.get(str(each.type), (None, ""))
        value = getattr(described, each.name)
        if holds is not None and not holds(value):
            raise DefinitionError(f"{owner}{each.name} is {shown(value)}: expected {expected}")


def names_fields(kind: _Kind) -> _Kind:
    """Decorate a dataclass: missing or unknown fields raise a `DefinitionError` that names the patch."""
    make = kind.__init__  # type: ignore[misc]

    @functools.wraps(make)
    def init(self: object, *args: Any, **kwargs: Any) -> None:
        try:
            make(self, *args, **kwargs)
        except TypeError as error:
            wrong = _wrong_fields(kind, args, kwargs)
            if not wrong:
                raise
            raise DefinitionError(wrong) from error

    kind.__init__ = init  # type: ignore[misc]
    return kind


def _wrong_fields(kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    names = [each.name for each in fields(kind)]
    given = dict(zip(names, args, strict=False)) | kwargs
    owner = f"{kind.__name__} {given.get('name', given.get('target', ''))}".rstrip()
    needed = [each.name for each in fields(kind) if each.default is MISSING and each.default_factory is MISSING]
    missing = [name for name in needed if name not in given]
    unknown = [name for name in kwargs if name not in names]
    if unknown:
        others = [name for name in names if name not in given]
        return f"{owner} has no field {unknown[0]!r}; expected one of {', '.join(others)}"
    if len(args) > len(names):
        return f"{owner} has {len(names)} fields ({', '.join(names)}), and {len(args)} values"
    if missing:
        return f"{owner} lacks {', '.join(missing)}"
    return next((f"{owner} has {name} twice" for name in names[: len(args)] if name in kwargs), "")


def check_items(owner: str, name: str, value: object, kind: type | tuple[type, ...]) -> None:
    """Check a field that is a non-empty tuple of objects.

    Args:
        owner: the beginning of the message.
        name: the field's name.
        value: the field's value.
        kind: the expected class of each item.

    Raises:
        DefinitionError: the value is not such a tuple.
    """
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, tuple) or not value or not all(isinstance(item, kinds) for item in value):
        expected = " or ".join(each.__name__ for each in kinds)
        hint = "; write (...,) around it, with the comma" if isinstance(value, kinds) else ""
        raise DefinitionError(f"{owner}: {name} is {shown(value)}; expected a tuple of one or more {expected}{hint}")
