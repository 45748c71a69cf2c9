"""What ``Trainer`` counts in an evaluation step: this rank's own number beside the one of all ranks.

The count that everybody gets is the released one, of all ranks. ``Trainer.compute_loss`` alone takes this rank's own in
its place, for the very tensor that an evaluation step has counted, and only where no code of a user's is in between: a
trainer that overrides ``compute_loss`` or ``prediction_step`` has what it had.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from . import _accumulation, _conditions, _known_loss

_counting: ContextVar[list[torch.Tensor] | None] = ContextVar("_counting", default=None)
"""Within the count of an evaluation step: what this rank has counted, once it has."""
_own = WeakTensorKeyDictionary()
"""By a count of all ranks, this rank's own; by an own one, None. Each as long as somebody holds it."""


def counted(trainer: Any, batches: list[Any], device: Any) -> Any:
    """In place of ``trainer._get_num_items_in_batch(batches, device)``, in an evaluation step."""
    if not (_is_of_ranks(trainer) and _is_known(trainer)):
        return trainer._get_num_items_in_batch(batches, device)
    before = _counting.set([])
    try:
        return trainer._get_num_items_in_batch(batches, device)
    finally:
        _counting.reset(before)


def _is_of_ranks(trainer: Any) -> bool:
    """Whether the count is a sum over ranks, each of which has whole sequences."""
    plan = getattr(trainer.accelerator, "parallelism_config", None)
    return (
        trainer.args.world_size > 1
        and bool(trainer.args.average_tokens_across_devices)
        and trainer.args.n_gpu <= 1
        and getattr(plan, "cp_size", 1) == getattr(plan, "sp_size", 1) == 1
    )


def _is_known(trainer: Any) -> bool:
    """Whether what makes the loss of the count is known: another one may multiply by the count, or divide by ranks."""
    # known: transformers' own compute_loss, and that of TRL's SFTTrainer, which hands the count on.
    return _accumulation._maker(trainer) in ("transformers", "SFTTrainer") and (
        _known_loss.author(trainer.prediction_step) in ("transformers", "trl")
    )


def evaluates_over_ranks(self: Any) -> bool | None:
    """Of a Trainer: whether its losses are scaled as gradients are; None where they are left as released."""
    if not _conditions.averaged_over_ranks(self):
        return False
    return True if _is_of_ranks(self) and _is_known(self) else None


def gathered(trainer: Any, count: torch.Tensor) -> Any:
    """In place of ``trainer.accelerator.gather(count).sum()``, in the count."""
    own = _counting.get()
    if own is not None:
        own[:] = [count]
    return trainer.accelerator.gather(count).sum()


def returned(trainer: Any, count: Any) -> Any:
    """What the count returns; this rank's own is kept beside it, 1 where it is 0: the loss is then 0, as it was."""
    return _returned(count, 1)


def returned_before_a_filter(trainer: Any, count: Any) -> Any:
    """The same where evaluation leaves losses out that are no number, as it does with those of nothing on one rank."""
    return _returned(count, 0 if trainer.args.logging_nan_inf_filter else 1)


def _returned(count: Any, least: int) -> Any:
    own = _counting.get()
    if own and isinstance(count, torch.Tensor):
        _own[count] = mine = own.pop().clamp(min=least).to(count.dtype)
        _own[mine] = None
    return count


def of_this_rank(count: Any) -> Any:
    """This rank's own, of a count that an evaluation step has made; any other is returned as it is."""
    own = _own.get(count) if _own and isinstance(count, torch.Tensor) else None
    return count if own is None else own


def is_of_ranks(count: Any) -> bool:
    """Whether it is no rank's own: what was divided by it is a part of a mean over ranks."""
    return not (_own and isinstance(count, torch.Tensor) and count in _own)
