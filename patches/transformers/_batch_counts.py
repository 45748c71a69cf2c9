"""The counts of ``Trainer`` in an evaluation step: this rank's own number together with that of all ranks.

All code receives the released count, that of all ranks. Only ``Trainer.compute_loss`` uses this rank's own count
instead, for the tensor that an evaluation step has counted, and only if no user code is in between: a trainer that
overrides ``compute_loss`` or ``prediction_step`` is not affected.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from . import _conditions, _known_loss, _known_trainer

_counting: ContextVar[list[torch.Tensor] | None] = ContextVar("_counting", default=None)
"""During the count of an evaluation step: this rank's count, once it exists."""
_own = WeakTensorKeyDictionary()
"""Maps a count of all ranks to this rank's own count, and an own count to None, while either is alive."""


def counted(trainer: Any, batches: list[Any], device: Any) -> Any:
    """Replaces ``trainer._get_num_items_in_batch(batches, device)`` in an evaluation step."""
    if not (_is_of_ranks(trainer) and _is_known(trainer)):
        return trainer._get_num_items_in_batch(batches, device)
    before = _counting.set([])
    try:
        return trainer._get_num_items_in_batch(batches, device)
    finally:
        _counting.reset(before)


def _is_of_ranks(trainer: Any) -> bool:
    """Whether the count is a sum over ranks with whole sequences."""
    plan = getattr(trainer.accelerator, "parallelism_config", None)
    return (
        trainer.args.world_size > 1
        and bool(trainer.args.average_tokens_across_devices)
        and trainer.args.n_gpu <= 1
        and getattr(plan, "cp_size", 1) == getattr(plan, "sp_size", 1) == 1
    )


def _is_known(trainer: Any) -> bool:
    """Whether the code that uses the count is known: other code may multiply by the count, or divide by the ranks."""
    # known: transformers' own compute_loss, and that of TRL's SFTTrainer, which passes the count on.
    return _known_trainer.maker(trainer) in ("transformers", "SFTTrainer") and (
        _known_loss.author(trainer.prediction_step) in ("transformers", "trl")
    )


def evaluates_over_ranks(self: Any) -> bool | None:
    """Trainer: whether its losses are scaled like gradients; None if they are left as released."""
    if not _conditions.averaged_over_ranks(self):
        return False
    return True if _is_of_ranks(self) and _is_known(self) else None


def gathered(trainer: Any, count: torch.Tensor) -> Any:
    """Replaces ``trainer.accelerator.gather(count).sum()`` in the count."""
    own = _counting.get()
    if own is not None:
        own[:] = [count]
    return trainer.accelerator.gather(count).sum()


def returned(trainer: Any, count: Any) -> Any:
    """The result of the count, with this rank's own count noted, as 1 if it is 0: the loss is then 0, as before."""
    return _returned(count, 1)


def returned_before_a_filter(trainer: Any, count: Any) -> Any:
    """The same if evaluation omits losses that are NaN or infinite, like those of an empty batch on one rank."""
    return _returned(count, 0 if trainer.args.logging_nan_inf_filter else 1)


def _returned(count: Any, least: int) -> Any:
    own = _counting.get()
    if own and isinstance(count, torch.Tensor):
        _own[count] = mine = own.pop().clamp(min=least).to(count.dtype)
        _own[mine] = None
    return count


def of_this_rank(count: Any) -> Any:
    """This rank's own count, for a count that an evaluation step has made; any other count is returned as it is."""
    own = _own.get(count) if _own and isinstance(count, torch.Tensor) else None
    return count if own is None else own


def is_of_ranks(count: Any) -> bool:
    """Whether it is no rank's own count: a loss that was divided by it is a part of a mean over ranks."""
    return not (_own and isinstance(count, torch.Tensor) and count in _own)
