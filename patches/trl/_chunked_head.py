"""TRL's chunked losses on an output head that DeepSpeed ZeRO-3 partitions: one gather in forward, one in backward.

The functions that the trainers call gather within each chunk (or not at all), in forward and when backward recomputes
a chunk. Here one autograd function runs the whole loop over the chunks, so the number of collectives depends neither
on the number of chunks nor on this rank's tokens. It calls the release's own `_chunk`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch

import rlhf_patches
from rlhf_patches import matched

from . import _zero3, chunked_divergence_zero3, chunked_nll_zero3

_IGNORED = -100


@dataclass(frozen=True)
class _Shape:
    """Differences between the releases that affect a result.

    Attributes:
        valid_first: whether valid rows come first, and ignored ones fill up the last chunk.
        divides_nothing: whether a loss without any valid token is divided too: 0 / num_items_in_batch.
    """

    valid_first: bool
    divides_nothing: bool


_SHAPES = {
    "049d735a374630d9": _Shape(valid_first=False, divides_nothing=False),
    "7aae60e97f5d4b57": _Shape(valid_first=False, divides_nothing=False),
    "8523748fe2b17e15": _Shape(valid_first=True, divides_nothing=False),
    "e05f4e153a955ab1": _Shape(valid_first=True, divides_nothing=False),
    "9df531774182647a": _Shape(valid_first=True, divides_nothing=True),
    "c4ef116d3690c7b8": _Shape(valid_first=True, divides_nothing=False),
    "a054e2695a826a96": _Shape(valid_first=True, divides_nothing=True),
    "62c2de8dbb288f54": _Shape(valid_first=True, divides_nothing=True),
}
"""By fingerprint; the patches name the releases of each."""


def around_nll(wrapped: Any, instance: None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around SFT's `_chunked_cross_entropy_loss`: replaces it if ZeRO-3 manages the head, gathered or not.

    A head that is gathered in forward (by DeepSpeed, because the model's forward reads it) can be partitioned again
    when backward recomputes the chunks.
    """
    _, weight, _, labels, shift_labels, *_, bias = args
    if not any(map(_zero3.is_zero3, (weight, bias))):
        rlhf_patches.decided(chunked_nll_zero3.PATCH.name, False)
        return wrapped(*args, **kwargs)
    if labels is None and shift_labels is None:
        return wrapped(*args, **kwargs)
    shape = _SHAPES[matched(chunked_nll_zero3.PATCH.name, chunked_nll_zero3.TARGET)]
    return _nll(shape, wrapped, *args, **kwargs)


def around_divergence(wrapped: Any, instance: None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around distillation's `_chunked_divergence_loss`: the same for the student's head and the teacher's."""
    _, _, student, teacher, _, _, _, _, student_bias, teacher_bias, *_ = args
    if not any(map(_zero3.is_zero3, (student, teacher, student_bias, teacher_bias))):
        rlhf_patches.decided(chunked_divergence_zero3.PATCH.name, False)
        return wrapped(*args, **kwargs)
    shape = _SHAPES[matched(chunked_divergence_zero3.PATCH.name, chunked_divergence_zero3.TARGET)]
    return _divergence(shape, wrapped, *args, **kwargs)


@torch.compiler.disable
def _nll(
    shape: _Shape,
    trl: Any,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    chunk_size: int,
    labels: torch.Tensor | None,
    shift_labels: torch.Tensor | None,
    num_items_in_batch: torch.Tensor | int | None,
    logit_scale: float,
    final_logit_softcapping: float | None,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    if shift_labels is None:
        assert labels is not None
        shift_labels, hidden_states = labels[..., 1:], hidden_states[..., :-1, :]
    targets = shift_labels.reshape(-1)
    valid = targets != _IGNORED
    chunk = trl.__globals__["_chunk"]

    def compute(rows: torch.Tensor, head: list[Any], targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result: tuple[torch.Tensor, ...] = chunk(rows, *head, targets, logit_scale, final_logit_softcapping)
        return result

    chosen, number = _chosen(shape, valid), valid.sum()
    loop = _Loop(compute, chunk_size, int(number), (True, False, True))  # loss, correct predictions, entropy
    loss, correct, entropy = loop.sums(_flat(hidden_states)[chosen], (weight, bias), (), targets[chosen])
    return _reduced(shape, loss, number, loop.valid, num_items_in_batch), correct, entropy, number


@torch.compiler.disable
def _divergence(
    shape: _Shape,
    trl: Any,
    student_hidden_states: torch.Tensor,
    teacher_hidden_states: torch.Tensor,
    student: torch.Tensor,
    teacher: torch.Tensor,
    completion_mask: torch.Tensor,
    beta: float,
    chunk_size: int,
    num_items_in_batch: torch.Tensor | int | None,
    student_bias: torch.Tensor | None,
    teacher_bias: torch.Tensor | None,
    student_scale: float,
    teacher_scale: float,
    student_softcap: float | None,
    teacher_softcap: float | None,
    temperature: float,
) -> tuple[torch.Tensor, ...]:
    valid = completion_mask.reshape(-1) != 0
    chunk = trl.__globals__["_chunk"]

    def compute(
        rows: torch.Tensor, head: list[Any], teacher_rows: torch.Tensor, valid: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        of_student = (rows, *head[:2], student_scale, student_softcap)
        of_teacher = (teacher_rows, *head[2:], teacher_scale, teacher_softcap)
        result: tuple[torch.Tensor, ...] = chunk(*of_student, *of_teacher, beta, temperature, valid)
        return result

    chosen, number = _chosen(shape, valid), valid.sum()
    loop = _Loop(compute, chunk_size, int(number), (True, True))  # loss, entropy
    others = (_flat(teacher_hidden_states)[chosen].detach(), valid[chosen].float())
    rows, fixed = _flat(student_hidden_states)[chosen], (teacher, teacher_bias)
    loss, entropy = loop.sums(rows, (student, student_bias), fixed, *others)
    return _reduced(shape, loss, number, loop.valid, num_items_in_batch), entropy, number


def _chosen(shape: _Shape, valid: torch.Tensor) -> torch.Tensor:
    """The selected rows, in order."""
    return valid.to(torch.int8).argsort(descending=True, stable=True) if shape.valid_first else valid


def _reduced(shape: _Shape, loss: torch.Tensor, number: torch.Tensor, valid: int, items: Any) -> torch.Tensor:
    if items is None:
        return loss / number.clamp(min=1)
    if not valid and not shape.divides_nothing:
        return loss
    return loss / (items.to(loss.device) if isinstance(items, torch.Tensor) else items)


def _flat(hidden_states: torch.Tensor) -> torch.Tensor:
    return hidden_states.reshape(-1, hidden_states.size(-1))


@dataclass(frozen=True)
class _Loop:
    """The computation of a chunk, from its rows, the whole heads, and its part of other tensors; the number of
    rows.
    """

    compute: Callable[..., tuple[torch.Tensor, ...]]
    size: int
    valid: int
    differentiable: tuple[bool, ...]  # for each result

    def slices(self) -> list[slice]:
        return [slice(start, start + self.size) for start in range(0, self.valid, self.size)]

    def sums(
        self, rows: torch.Tensor, head: tuple[Any, Any], fixed: tuple[Any, ...], *others: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Each result summed over the chunks. ``fixed`` are a second head's weight and bias, without gradients."""
        with _zero3.gathered(head, fixed):
            # Autograd records the shape of a gradient when the graph is built: the head must be whole at this moment.
            result: tuple[torch.Tensor, ...] = _Sums.apply(self, fixed, rows, *head, *others)
        return result


class _Sums(torch.autograd.Function):
    """`_Loop.sums`, after the heads are gathered."""

    @staticmethod
    def forward(
        ctx: Any, loop: _Loop, fixed: tuple[Any, ...], rows: torch.Tensor, weight: Any, bias: Any, *others: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        # Not saved as tensors: they are empty between the passes, and hooks on saved tensors would copy a whole head.
        ctx.loop, ctx.head = loop, (weight, bias, *fixed)
        ctx.save_for_backward(rows, *others)
        ctx.set_materialize_grads(False)
        device = rows.device.type
        ctx.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        sums = tuple(rows.new_zeros((), dtype=torch.float32) for _ in loop.differentiable)
        head = _stand_ins(ctx.head)
        for part in loop.slices():
            chunk = loop.compute(rows[part], head, *(other[part] for other in others))
            sums = tuple(total + one for total, one in zip(sums, chunk, strict=True))
        ctx.mark_non_differentiable(*compress(sums, (not one for one in loop.differentiable)))
        return sums

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        _, _, need_rows, need_weight, need_bias, *rest = ctx.needs_input_grad
        gathered_here = _zero3.gather(ctx.head[:2], ctx.head[2:])
        try:
            found = _backward(ctx, (need_rows, need_weight, need_bias), gradients)
        except BaseException:
            _zero3.release(gathered_here)
            raise
        weight, bias, *_ = ctx.head
        for parameter in gathered_here:
            if (need_weight and parameter is weight) or (need_bias and parameter is bias):
                _zero3.release_after_accumulation(parameter)
            else:
                _zero3.release([parameter])
        return None, None, *found, *(None for _ in rest)


def _backward(ctx: Any, need: tuple[bool, ...], gradients: tuple[Any, ...]) -> list[torch.Tensor | None]:
    """The gradients of rows, weight and bias, in the order in which autograd would add them: last chunk first."""
    loop: _Loop = ctx.loop
    rows, *others = ctx.saved_tensors
    head = _stand_ins(ctx.head)
    for parameter in compress(head, need[1:]):
        parameter.requires_grad_()  # writes: this module's stand-in
    of_rows = torch.zeros_like(rows) if need[0] else None
    of_head: list[torch.Tensor | None] = [None, None]
    device, dtype, enabled = ctx.autocast
    given = [one is not None for one in gradients]
    for part in reversed(loop.slices() if any(given) else []):
        some = rows[part].detach().requires_grad_(need[0])
        with torch.enable_grad(), torch.autocast(device, dtype=dtype, enabled=enabled):
            outputs = loop.compute(some, head, *(other[part] for other in others))
        inputs = list(compress((some, *head), need))
        found = list(torch.autograd.grad(list(compress(outputs, given)), inputs, list(compress(gradients, given))))
        del outputs
        if of_rows is not None:
            of_rows[part] = found.pop(0)
        for index in (index for index in (0, 1) if need[1 + index]):
            one = found.pop(0)
            total = of_head[index]
            of_head[index] = one if total is None else total.add_(one)
    for index in (0, 1):
        if need[1 + index] and of_head[index] is None:  # no valid token on this rank, but others have some
            of_head[index] = torch.zeros_like(head[index])
    return [of_rows, *of_head]


def _stand_ins(head: tuple[Any, ...]) -> list[Any]:
    """The gathered heads without hooks and gradients, with DeepSpeed's status, which `_chunk` reads from them."""
    status = next(parameter.ds_status for parameter in head if _zero3.is_zero3(parameter))
    stand_ins = [None if parameter is None else parameter.detach() for parameter in head]
    for tensor in stand_ins:
        if tensor is not None:
            tensor.ds_status = status
    return stand_ins
