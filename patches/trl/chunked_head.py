"""The chunked loss on an output head that DeepSpeed ZeRO-3 partitions: one gather forward, one backward.

The function that the trainer calls gathers within each chunk (or not at all), forward and when a chunk is computed
again in backward. Here the whole loop over the chunks is one autograd function, so the number of collectives depends
neither on the number of chunks nor on this rank's tokens. What a chunk computes is the release's own `_chunk`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch

from . import zero3

_IGNORED = -100
_Chunk = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def around(wrapped: Any, instance: None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around `_chunked_cross_entropy_loss`: takes over if ZeRO-3 manages the head, whether gathered just now or not.

    A head that is gathered in forward (by DeepSpeed, because the model's forward reads it) can be partitioned again
    when backward computes the chunks a second time.
    """
    _, weight, _, labels, shift_labels, *_, bias = args
    if not (zero3.is_zero3(weight) or zero3.is_zero3(bias)) or (labels is None and shift_labels is None):
        return wrapped(*args, **kwargs)
    return _loss(_Release.of(wrapped), *args, **kwargs)


@dataclass(frozen=True)
class _Release:
    """How one release of TRL goes about it, where that shows in the result."""

    chunk: _Chunk
    static_shapes: bool  # 1.8 and later: valid tokens first, and the last chunk is filled up with ignored ones
    divides_nothing: bool  # before 1.11: without any valid token the loss is 0, not 0 / num_items_in_batch

    @classmethod
    def of(cls, function: Any) -> _Release:
        names = function.__code__.co_names
        return cls(function.__globals__["_chunk"], "argsort" in names, "clamp" not in names)


@torch.compiler.disable
def _loss(
    trl: _Release,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    chunk_size: int,
    labels: torch.Tensor | None,
    shift_labels: torch.Tensor | None,
    num_items_in_batch: torch.Tensor | int | None,
    logit_scale: float,
    final_logit_softcapping: float | None,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    if shift_labels is None:
        assert labels is not None
        shift_labels, hidden_states = labels[..., 1:], hidden_states[..., :-1, :]
    rows = hidden_states.reshape(-1, hidden_states.size(-1))
    targets = shift_labels.reshape(-1)
    valid = targets != _IGNORED
    number = valid.sum()
    chosen = valid.to(torch.int8).argsort(descending=True, stable=True) if trl.static_shapes else valid
    loop = _Loop(trl.chunk, chunk_size, int(number), (logit_scale, final_logit_softcapping))
    with zero3.gathered((weight, bias)):
        # Autograd notes the shape of a gradient when the graph is built: the head must be whole at this moment.
        loss, correct, entropy = _Head.apply(loop, rows[chosen], targets[chosen], weight, bias)
    if num_items_in_batch is None:
        return loss / number.clamp(min=1), correct, entropy, number
    if loop.valid or not trl.divides_nothing:
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        loss = loss / num_items_in_batch
    return loss, correct, entropy, number


@dataclass(frozen=True)
class _Loop:
    """The rows of each chunk, and what it computes."""

    chunk: _Chunk
    size: int
    valid: int
    scaling: tuple[float, float | None]

    def slices(self) -> list[slice]:
        return [slice(start, start + self.size) for start in range(0, self.valid, self.size)]

    def __call__(self, rows: torch.Tensor, weight: Any, bias: Any, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.chunk(rows, weight, bias, targets, *self.scaling)


class _Head(torch.autograd.Function):
    """Sums of loss, correct predictions and entropy over all chunks. The head must be gathered around ``apply``."""

    @staticmethod
    def forward(
        ctx: Any, loop: _Loop, rows: torch.Tensor, targets: torch.Tensor, weight: Any, bias: Any
    ) -> tuple[torch.Tensor, ...]:
        # Not saved as tensors: they are empty between the passes, and hooks on saved tensors would copy a whole head.
        ctx.loop, ctx.head = loop, (weight, bias)
        ctx.save_for_backward(rows, targets)
        ctx.set_materialize_grads(False)
        device = rows.device.type
        ctx.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        sums = tuple(rows.new_zeros((), dtype=torch.float32) for _ in range(3))
        weight, bias = _stand_ins(ctx.head)
        for part in loop.slices():
            chunk = loop(rows[part], weight, bias, targets[part])
            sums = tuple(total + one for total, one in zip(sums, chunk, strict=True))
        ctx.mark_non_differentiable(sums[1])
        return sums

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        rows, targets = ctx.saved_tensors
        _, need_rows, _, need_weight, need_bias = ctx.needs_input_grad
        held = zero3.gather(ctx.head)
        try:
            of_rows, *of_head = _backward(ctx, rows, targets, (need_rows, need_weight, need_bias), gradients)
        except BaseException:
            zero3.release(held)
            raise
        for parameter in held:
            needed = need_weight if parameter is ctx.head[0] else need_bias
            if needed:
                zero3.release_after_accumulation(parameter)
            else:
                zero3.release([parameter])
        return None, of_rows, None, *of_head


def _backward(
    ctx: Any, rows: torch.Tensor, targets: torch.Tensor, need: tuple[bool, ...], gradients: tuple[Any, ...]
) -> list[torch.Tensor | None]:
    """The gradients of rows, weight and bias, in the order in which autograd would add them up: last chunk first."""
    loop: _Loop = ctx.loop
    weight, bias = _stand_ins(ctx.head)
    for parameter, needed in ((weight, need[1]), (bias, need[2])):
        if needed:
            parameter.requires_grad_()
    of_rows = torch.zeros_like(rows) if need[0] else None
    of_head: list[torch.Tensor | None] = [None, None]
    device, dtype, enabled = ctx.autocast
    given = [one is not None for one in gradients]
    for part in reversed(loop.slices() if any(given) else []):
        some = rows[part].detach().requires_grad_(need[0])
        with torch.enable_grad(), torch.autocast(device, dtype=dtype, enabled=enabled):
            outputs = loop(some, weight, bias, targets[part])
        inputs = list(compress((some, weight, bias), need))
        found = list(torch.autograd.grad(list(compress(outputs, given)), inputs, list(compress(gradients, given))))
        del outputs
        if of_rows is not None:
            of_rows[part] = found.pop(0)
        for index in (index for index in (0, 1) if need[1 + index]):
            one = found.pop(0)
            total = of_head[index]
            of_head[index] = one if total is None else total.add_(one)
    for index, parameter in enumerate((weight, bias)):
        if need[1 + index] and of_head[index] is None:  # no valid token on this rank, but others have some
            of_head[index] = torch.zeros_like(parameter)
    return [of_rows, *of_head]


def _stand_ins(head: tuple[Any, ...]) -> list[Any]:
    """The gathered head without hooks and gradients. `_chunk` asks DeepSpeed's status of it, so that comes along."""
    status = next(parameter.ds_status for parameter in head if zero3.is_zero3(parameter))
    stand_ins = [None if parameter is None else parameter.detach() for parameter in head]
    for tensor in stand_ins:
        if tensor is not None:
            tensor.ds_status = status
    return stand_ins
