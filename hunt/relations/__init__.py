"""Relations: pairs of settings under which a trainer must hand over the same. A module of a few lines is one."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

STEP = ("loss", "gradient", "values")
"""What an optimizer step is made of: the loss as it is logged, the gradient as the optimizer gets it; and what a
function returns that is no step: advantages, log-probabilities."""


@dataclass(frozen=True)
class Pair:
    """Two settings that must agree.

    Attributes:
        name: of the pair, within its relation.
        one, other: settings by name. A trainer that does not take one of them has no such pair.
        parts: of the outcome that are compared, of those that both have.
        tolerance: the largest relative deviation that is rounding: sums of some thousand products in float32, whose
            order differs, deviate by 1e-7 to 1e-5.
    """

    name: str
    one: Mapping[str, Any]
    other: Mapping[str, Any]
    parts: tuple[str, ...] = STEP
    tolerance: float = 1e-4

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({**self.one, **self.other})


@dataclass(frozen=True)
class Relation:
    """A module of this package: ``PAIRS``, and a docstring that says what must hold, and why."""

    name: str
    words: str
    pairs: tuple[Pair, ...]


def every() -> dict[str, Relation]:
    """All relations by name."""
    found = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        found[info.name] = Relation(info.name, " ".join((module.__doc__ or "").split()), tuple(module.PAIRS))
    return found
