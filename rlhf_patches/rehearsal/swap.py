"""Swapped rows: which micro-batch has a row, and which place in it, leaves the window's gradient as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from . import pieces, window
from .relation import Relation, Verdict

NAME = "swapped rows"
_NAMES = frozenset(
    {
        *("input_ids", "labels", "attention_mask", "position_ids", "token_type_ids"),
        *("decoder_input_ids", "decoder_attention_mask"),
    }
)

Inputs = dict[str, Any]


def cannot(inputs: Any) -> str:
    """Return why rows cannot be swapped; empty if they can."""
    if not isinstance(inputs, Mapping):
        return f"the micro-batch is a {type(inputs).__name__}, not a mapping"
    given = _given(inputs)
    ids = given.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or not isinstance(given.get("labels"), torch.Tensor):
        return "the micro-batch has no input_ids with labels"
    if others := sorted({*given} - _NAMES):
        return f"{others[0]} is not known to have one entry per row"
    if any(not isinstance(each, torch.Tensor) or not each.dim() or len(each) != len(ids) for each in given.values()):
        return "the inputs differ in their number of rows"
    return ""


def windows(inputs: Any, within: bool) -> tuple[list[Inputs], list[Inputs]]:
    """Return two windows of the same rows.

    The second micro-batch of each has the first one's rows with their tokens reversed, so that all counts are equal.

    Args:
        inputs: a micro-batch.
        within: whether rows only change places within their micro-batch.
    """
    first = _given(inputs)
    second = {**first, "input_ids": _backwards(first["input_ids"], first.get("attention_mask"))}
    if within:
        return [first, second], [_flipped(first), _flipped(second)]
    swapped = [
        {name: torch.cat([other[name][:1], each[1:]]) for name, each in mine.items()}
        for mine, other in ((first, second), (second, first))
    ]
    return [first, second], [_flipped(each) for each in swapped]


def _given(inputs: Mapping[str, Any]) -> Inputs:
    return {name: value for name, value in inputs.items() if value is not None}


def _flipped(inputs: Inputs) -> Inputs:
    return {name: each.flip(0) for name, each in inputs.items()}


def _backwards(ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    made = ids.clone()
    for row in range(len(ids)):
        known = mask is not None and mask.shape == ids.shape
        places = mask[row].nonzero()[:, 0] if known else torch.arange(ids.shape[1], device=ids.device)  # type: ignore[index]
        made[row, places] = ids[row, places.flip(0)]
    return made


def by_design(trainer: Any, model: torch.nn.Module) -> tuple[str, bool]:
    """Return why rows may have places, and whether only the user knows."""
    why = pieces.unknown(trainer, model)
    released = pieces.written_in(type(trainer).compute_loss).startswith(("transformers.", "trl.", "swift."))
    return why, bool(why) and not released and getattr(trainer, "compute_loss_func", None) is None


def judge(one: torch.Tensor, other: torch.Tensor, noise: float, known: bool) -> Relation:
    """Compare the gradients of the two windows.

    Args:
        known: whether the loss is known to be the same for each order of rows.
    """
    apart = float((other - one).norm()) / (float(one.norm()) or 1.0)
    if apart <= window.limit(noise):
        return Relation(NAME, Verdict.HOLDS, f"{apart:.0e}")
    if known:
        return Relation(NAME, Verdict.DEVIATES, f"{apart:.2g}", "the gradient depends on the rows' places")
    text = "the gradient depends on the rows' order: the loss leaves out rows, or it compares rows"
    return Relation(NAME, Verdict.NOTE, f"{apart:.2g}", text)
