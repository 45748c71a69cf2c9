"""Removes padding from a batch and restores it in the model's output, without a loop over the rows."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable


def compact(
    attention_mask: torch.Tensor,
    lengths: torch.Tensor,
    new_attention_mask: torch.Tensor,
    *moved: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Move the real tokens of each row to its left end, as the loop of ``remove_left_padding`` does.

    Args:
        attention_mask: bool ``[B, S]``, true for real tokens, at any position of their row.
        lengths: the number of real tokens in each row, ``[B]``.
        new_attention_mask: zeros ``[B, S']``, with ``S'`` no less than any length; filled in place.
        moved: pairs of zeros ``[B, S']``, filled in place, and their sources, ``[B, S]``.
    """
    columns = new_attention_mask.shape[1]
    kept = torch.arange(columns, device=lengths.device) < lengths[:, None]
    new_attention_mask.copy_(kept)  # writes: a tensor that the caller has just created to be filled
    sources = _places(attention_mask)[:, :columns]
    for new, old in moved:
        width = sources.shape[1]  # may be less than S', which is rounded up
        # writes: the same
        new[:, :width] = old.gather(1, sources).masked_fill_(~kept[:, :width], 0)


def recover_left_padding(
    result: torch.Tensor,
    attention_mask: torch.Tensor,
    original_attention_mask: torch.Tensor,
    origin_seqlen: int,
    post_process: bool = True,
) -> torch.Tensor:
    """``recover_left_padding``: moves each row's real tokens back to their positions, with zeros between them.

    Args:
        result: the model's output ``[B, S', ...]``.
        attention_mask: bool ``[B, S']``, of the model's input.
        original_attention_mask: bool ``[B, S]``, with as many real tokens in each row.
        origin_seqlen: ``S``.
        post_process: whether this is the last pipeline stage; if not, ``result`` is returned as it is.

    Returns:
        ``[B, S, ...]``, in the dtype of ``result``.

    Raises:
        ValueError: the output is split on the sequence, or shapes or lengths do not fit together.
    """
    if not post_process:
        return result
    rows, columns = attention_mask.shape
    if result.shape[0] == rows and 0 < result.shape[1] < columns and columns % result.shape[1] == 0:
        raise ValueError(
            f"the model's output is split on the sequence: it is {list(result.shape)}, and its input was "
            f"{[rows, columns]}. Expected logits of all tokens on each rank. The output layer has to gather its input, "
            "as megatron-core's does when it is built with sequence_parallel=True; logits that each rank has made from "
            "its own tokens with its own part of the vocabulary cannot be combined afterwards. "
            "See docs/skyrl-split-logits.md of rlhf_patches"
        )
    if result.shape[:2] != attention_mask.shape or original_attention_mask.shape != (rows, origin_seqlen):
        raise ValueError(
            f"the model's output is {list(result.shape)}, the mask of its input {[rows, columns]}, and the mask from "
            f"before {list(original_attention_mask.shape)}: expected [B, S', ...], [B, S'] and [B, {origin_seqlen}]"
        )
    if not torch.equal(attention_mask.sum(1), original_attention_mask.sum(1)):
        raise ValueError(
            "attention_mask and original_attention_mask do not have the same number of real tokens in each row: "
            "expected the mask that remove_left_padding has made from the original one"
        )
    restored: torch.Tensor = _Restore.apply(result, attention_mask, original_attention_mask)
    return restored


def _places(mask: torch.Tensor) -> torch.Tensor:
    """The positions of the real tokens of each row, in order, and then the positions of the others: ``[B, S]``."""
    return mask.logical_not().byte().argsort(dim=1, stable=True)


class _Restore(torch.autograd.Function):
    """Each copy is one index_select, forward and backward: no tensor besides the result, and no loop over rows."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, mask: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(mask, original)
        return _move(result, mask, original)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        mask, original = ctx.saved_tensors
        return _move(gradient, original, mask), None, None


def _move(values: torch.Tensor, mask: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Move the n-th real token of each row of ``mask`` to the n-th position of ``wanted``; write zeros elsewhere."""
    rows, columns = mask.shape
    moved = values.new_empty(*wanted.shape, *values.shape[2:])
    if not values.numel() or not moved.numel():
        return moved.zero_()
    number = (wanted.cumsum(1) - 1).clamp(min=0, max=columns - 1)
    places = _places(mask).gather(1, number) + columns * torch.arange(rows, device=mask.device)[:, None]
    flat = values.reshape(rows * columns, -1)
    torch.index_select(flat, 0, places.view(-1), out=moved.view(wanted.numel(), -1))
    padding = wanted.logical_not().view(*wanted.shape, *(1,) * (values.dim() - 2))
    return moved.masked_fill_(padding, 0)
