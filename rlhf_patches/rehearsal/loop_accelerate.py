"""What a loop says to accelerate: how many micro-batches there are in a window, and what is divided by their number."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from . import pieces
from .relation import Relation, Verdict, micro_batches

NAME = "gradient accumulation"
_MODULE = "accelerate.accelerator"
_SHARDED = ("DEEPSPEED", "MEGATRON_LM", "TP", "XLA")


class Accelerate:
    """Follows calls of ``Accelerator.backward`` and ``Accelerator.accumulate``."""

    def __init__(self) -> None:
        self._undo: Callable[[], None] | None = None
        self._passes: list[tuple[int, bool, bool]] = []
        self._entered = 0
        self._twice = 0
        self._kind = ""
        self._unknown = ""

    def begin(self) -> None:
        """Set the hooks, now or when accelerate is imported."""
        from ..engine import import_hooks

        module = sys.modules.get(_MODULE)
        if module is not None and import_hooks.is_ready(module):
            self._wrap(_MODULE, module)
        else:
            import_hooks.watch(_MODULE, self._wrap)
            self._undo = lambda: import_hooks.unwatch(_MODULE, self._wrap)

    def close(self) -> None:
        """Remove the hooks."""
        if self._undo is not None:
            self._undo()
            self._undo = None

    def _wrap(self, name: str, module: Any) -> None:
        kind = module.Accelerator
        backward, accumulate = kind.backward, kind.accumulate
        if pieces.written_in(backward) != _MODULE:
            self._unknown = "Accelerator.backward is not accelerate's own"
            return

        @functools.wraps(backward)
        def noted(accelerator: Any, loss: Any, **named: Any) -> Any:
            self._note(accelerator, loss)
            return backward(accelerator, loss, **named)

        @functools.wraps(accumulate)
        def entered(accelerator: Any, *models: Any) -> Any:
            self._entered += 1
            return accumulate(accelerator, *models)

        kind.backward, kind.accumulate = noted, entered

        def undo() -> None:
            kind.backward = backward if kind.backward is noted else kind.backward
            kind.accumulate = accumulate if kind.accumulate is entered else kind.accumulate

        self._undo = undo

    def _note(self, accelerator: Any, loss: Any) -> None:
        self._kind = str(getattr(accelerator.distributed_type, "value", ""))
        number = int(accelerator.gradient_accumulation_steps)
        ended = bool(getattr(accelerator.gradient_state, "end_of_dataloader", False))
        self._passes.append((number, bool(accelerator.sync_gradients), ended))
        node = getattr(loss, "grad_fn", None)
        if number > 1 and node is not None and node.name() == "DivBackward0":
            other = getattr(node, "_saved_other", None)
            self._twice += other is not None and getattr(other, "numel", lambda: 0)() == 1 and float(other) == number

    def unknown(self) -> str:
        """Return why the loop's gradients cannot be followed; empty if they can."""
        if self._kind in _SHARDED:
            return f"accelerate's {self._kind} makes the gradients"
        return self._unknown

    def relations(self, optimizers: int) -> list[Relation]:
        """Return the relation; none if the loop does not accumulate by accelerate."""
        numbers = {each[0] for each in self._passes}
        if not self._passes or numbers == {1}:
            return []
        if len(numbers) > 1 or optimizers > 1:
            return []
        number = numbers.pop()
        measured = micro_batches(number)
        if not self._entered and len(self._passes) == 2:
            text = f"{1 / number:.3g} x: accelerate divides each loss by {number}, and each step has one backward pass"
            return [Relation(NAME, Verdict.DEVIATES, measured, f"{text}: accumulate() is not used")]
        if self._twice:
            text = f"your code divides the loss by {number}, and accelerate does, too"
            return [Relation(NAME, Verdict.NOTE, measured, text)]
        if any(sync and ended for _, sync, ended in self._passes) and len(self._passes) % number:
            text = "the data loader ended within a window: its gradient is smaller"
            return [Relation(NAME, Verdict.NOTE, measured, text)]
        return [Relation(NAME, Verdict.HOLDS, measured, "accelerate divides each loss by their number")]
