"""Rows: an example is a row, ranks have other rows, and an epoch has the rows of the data set. It reads nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..definitions.words import plural
from . import ranks
from .checks import attempted
from .relation import Relation, Verdict, not_checked

NAME = "rows"


@dataclass(frozen=True)
class Epoch:
    """What a data loader yields in an epoch, on all ranks together.

    Args:
        length: the number of rows in the data set.
        drawn: the number of rows that the sampler draws.
        size: the number of rows in a batch of one rank.
        left: the number of drawn rows that no batch has.
        again: the number of rows that a batch has for a second time, to be full.
        why: why it is not known; empty if it is.
    """

    length: int = 0
    drawn: int = 0
    size: int = 0
    left: int = 0
    again: int = 0
    why: str = ""


def epoch(loader: Any, number: int) -> Epoch:
    """Count the rows by the lengths of a loader's samplers.

    Args:
        loader: a prepared ``DataLoader``.
        number: the number of ranks.
    """
    from torch.utils.data import BatchSampler

    shard, dataset = getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None)
    batches: Any = getattr(shard, "batch_sampler", shard)
    if (
        dataset is None
        or not hasattr(dataset, "__len__")
        or type(batches) is not BatchSampler
        or getattr(shard, "split_batches", False)
    ):
        return Epoch(why="the data loader is not known to have one batch of rows after another")
    length, drawn, size = len(dataset), len(batches.sampler), int(batches.batch_size)
    if number > 1 and (shard is batches or getattr(shard, "num_processes", None) != number):
        return Epoch(length, drawn, size, why="the data loader is not accelerate's for these ranks")
    together = size * number
    if batches.drop_last:
        return Epoch(length, drawn, size, left=drawn % together)
    fills = number > 1 and getattr(shard, "even_batches", True)
    return Epoch(length, drawn, size, again=-drawn % together if fills else 0)


def relation(trainer: Any, inputs: Sequence[Any], generates: str) -> Relation:
    """Compare the window's rows with the data loader, and with those of other ranks.

    Args:
        trainer: a ``transformers.Trainer`` that trains.
        inputs: the window's micro-batches.
        generates: why the inputs are not those of the data loader; empty if they are.
    """
    loader = getattr(trainer.callback_handler, "train_dataloader", None)
    number = trainer.accelerator.num_processes
    of_epoch = Epoch(why=generates) if generates else epoch(loader, number)
    of_ranks = ranks.gathered(
        attempted(lambda: ranks.Mine(used=torch.tensor([*map(_digest, inputs)], dtype=torch.float64)))
    )
    if why := ranks.problem(of_ranks):
        return not_checked(NAME, why)
    many = bool(of_epoch.size) and of_epoch.length >= of_epoch.size * number * len(inputs)
    if many and len(of_ranks) > 1 and _differ(inputs) and not _splits_rows(trainer):
        for rank, each in enumerate(of_ranks[1:], 1):
            if torch.equal(each.used, of_ranks[0].used):
                return Relation(NAME, Verdict.DEVIATES, text=f"rank {rank} trains on the same rows as rank 0")
    if of_epoch.why:
        return not_checked(NAME, of_epoch.why)
    notes = [*_notes(of_epoch), *_merged(inputs[0], of_epoch)]
    measured = f"{of_epoch.drawn - of_epoch.left} of {plural(of_epoch.length, 'row', 'rows')}"
    return Relation(NAME, Verdict.NOTE if notes else Verdict.HOLDS, measured, "; ".join(notes))


def _notes(of_epoch: Epoch) -> Iterator[str]:
    if of_epoch.drawn != of_epoch.length:
        yield f"the sampler draws {plural(of_epoch.drawn, 'row', 'rows')} in each epoch"
    if of_epoch.left:
        yield f"{of_epoch.left} are left out in each epoch (dataloader_drop_last)"
    if of_epoch.again:
        yield f"{of_epoch.again} are drawn twice in each epoch, to fill the last batches"


def _merged(inputs: Any, of_epoch: Epoch) -> Iterator[str]:
    ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or len(ids) != 1 or min(of_epoch.size, of_epoch.length) < 2:
        return
    tensors = {name for name, each in inputs.items() if isinstance(each, torch.Tensor)}
    if tensors <= {"input_ids", "labels", "attention_mask"}:  # no positions tell the examples apart
        yield f"a batch of {of_epoch.size} examples has one row"


def _splits_rows(trainer: Any) -> bool:
    """Whether several ranks may share their rows on purpose (sequence and tensor parallelism)."""
    config = getattr(trainer.accelerator, "parallelism_config", None)
    return config is not None or getattr(trainer, "get_sp_size", lambda: 1)() > 1


def _tensors(inputs: Any) -> Iterator[torch.Tensor]:
    if isinstance(inputs, Mapping):
        for name in sorted(map(str, inputs)):
            yield from _tensors(inputs.get(name))
    elif isinstance(inputs, torch.Tensor):
        yield inputs


def _digest(inputs: Any) -> float:
    """Return a number that is the same for the same tensors."""
    found = hashlib.sha256()
    for each in _tensors(inputs):
        found.update(str(each.shape).encode())
        found.update(each.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return float(int.from_bytes(found.digest()[:6], "big"))


def _differ(inputs: Sequence[Any]) -> bool:
    """Whether the window has two rows that differ."""
    ids = [each.get("input_ids") if isinstance(each, Mapping) else None for each in inputs]
    rows = {tuple(row.tolist()) for each in ids if isinstance(each, torch.Tensor) and each.dim() == 2 for row in each}
    return len(rows) > 1
