"""Subclasses of a user's in the place of GRPO's trainer, for a worker that trains it by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import trl


def each(kinds: Iterable[type], train: Callable[[], Any]) -> dict[str, Any]:
    """What training comes to with each of them, by its name."""
    found = {}
    released = trl.GRPOTrainer
    for kind in kinds:
        trl.GRPOTrainer = kind
        try:
            found[kind.__name__] = train()
        finally:
            trl.GRPOTrainer = released
    return found
