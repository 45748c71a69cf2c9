"""Adapters: each builds a trainer with a tiny model, takes a step as it is told, and hands over what came of it.

A module is named after its framework, and names nothing of it at its top: what lists the trainers has no framework.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hunt.outcomes import Outcome


class CannotRun(Exception):
    """This release has no such trainer, or not with these settings; the message says which."""


@dataclass(frozen=True)
class Trainer:
    """An adapter.

    Attributes:
        name: ``FRAMEWORK/TRAINER``.
        run: takes settings by name, on each rank, and returns the outcome, of which rank 0's counts.
        takes: the names of settings that it takes; a relation runs on it if these are all that it varies.
        fixed: settings that make this trainer of an adapter for several.
    """

    name: str
    run: Callable[..., Outcome]
    takes: frozenset[str]
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def framework(self) -> str:
        return self.name.partition("/")[0]


_FOUND: dict[str, Trainer] = {}


def trainer(*names: str, takes: Iterable[str] = (), **each: Any) -> Callable[[Callable[..., Outcome]], Any]:
    """Register an adapter under each name, ``FRAMEWORK/TRAINER``.

    Args:
        names: one or more; the adapter of several is told by ``name`` which one it is.
        takes: settings that it takes by ``**``, besides those that its signature names.
        each: settings that all of them have, whatever the relation.
    """

    def register(function: Callable[..., Outcome]) -> Callable[..., Outcome]:
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        named = {item.name for item in inspect.signature(function).parameters.values() if item.kind in kinds}
        fixed = dict(each)
        for name in names:
            if "name" in named:
                fixed = {**each, "name": name.partition("/")[2]}
            if name in _FOUND:
                raise ValueError(f"two trainers are named {name}")
            _FOUND[name] = Trainer(name, function, frozenset({*named, *takes} - fixed.keys()), fixed)
        return function

    return register


def every() -> dict[str, Trainer]:
    """All adapters by name."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return dict(_FOUND)
