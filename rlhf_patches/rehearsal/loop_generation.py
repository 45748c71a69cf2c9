"""Checks that a model generates at most as many tokens as a training loop asks for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .loop_models import Models
from .relation import Relation, Verdict

NAME = "generated tokens"


class Generation:
    """Follows ``generate`` of the models that a loop trains, if they are transformers' models or subclasses.

    Args:
        models: the models.
    """

    def __init__(self, models: Models) -> None:
        self._most: tuple[int, int] | None = None
        self._undo: list[Callable[[], None]] = []
        for kind in {type(each) for root in models.roots for each in root.modules()}:
            if any(base.__name__ == "GenerationMixin" for base in kind.__mro__) and callable(kind.generate):
                self._wrap(kind)

    def close(self) -> None:
        """Restore the classes."""
        for each in self._undo:
            each()
        self._undo = []

    def _wrap(self, kind: Any) -> None:
        generate, own = kind.generate, "generate" in vars(kind)

        @functools.wraps(generate)
        def counted(model: Any, *given: Any, **named: Any) -> Any:
            made = generate(model, *given, **named)
            self._count(model, given, named, made)
            return made

        def undo() -> None:
            if own:
                kind.generate = generate
            elif vars(kind).get("generate") is counted:
                del kind.generate

        kind.generate = counted
        self._undo.append(undo)

    def _count(self, model: Any, given: Any, named: Any, made: Any) -> None:
        asked = named.get("max_new_tokens", getattr(named.get("generation_config"), "max_new_tokens", None))
        prompt = next((named[name] for name in ("input_ids", "inputs") if name in named), given[0] if given else None)
        made = getattr(made, "sequences", made)
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False) or not isinstance(asked, int):
            return
        tokens = [each for each in (prompt, made) if isinstance(each, torch.Tensor) and each.dim() == 2]
        if len(tokens) < 2 or tokens[0].is_floating_point():
            return
        found = tokens[1].shape[1] - tokens[0].shape[1]
        if self._most is None or found - asked > self._most[0] - self._most[1]:
            self._most = found, asked

    def relation(self) -> Relation | None:
        """Return the relation; None if nothing was generated."""
        if self._most is None:
            return None
        found, asked = self._most
        if found > asked:
            return Relation(NAME, Verdict.DEVIATES, str(found), f"generate() was asked for at most {asked} new tokens")
        return Relation(NAME, Verdict.HOLDS, str(found), f"at most {asked}")
