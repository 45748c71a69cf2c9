"""Muon on the gradients that ZeRO-3 has accumulated in a step, by the release's own function."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from .. import _released

_STAGE3 = "deepspeed.runtime.zero.stage3"
_FUNCTIONS = (
    "step",
    "_pre_step",
    "_get_norm_groups",
    "_apply_distributed_muon_update",
    "partition_grads",
    "_partitioned_buffers_all_gather",
)


class Waiting:
    """Of the step that an optimizer accumulates.

    Attributes:
        whole: whether Muon waits for the end of the step.
        params: by the dtype of a bucket, the `ds_id` of the parameters that Muon still has to run on.
        done: those of the bucket that it has just run on.
    """

    def __init__(self, whole: bool) -> None:
        self.whole = whole
        self.params: dict[torch.dtype, set[int]] = {}
        self.done: set[int] = set()


class Gathered:
    """A parameter whose `grad` is the sum over a step. The parameter itself is partitioned, and cannot have one."""

    def __init__(self, param: Any, grad: torch.Tensor) -> None:
        self.param, self.grad = param, grad

    def __getattr__(self, name: str) -> Any:
        return getattr(self.param, name)


_steps: weakref.WeakKeyDictionary[Any, Waiting] = weakref.WeakKeyDictionary()
_ended: weakref.WeakKeyDictionary[Any, Waiting] = weakref.WeakKeyDictionary()
_gathered: weakref.WeakKeyDictionary[Any, list[Gathered]] = weakref.WeakKeyDictionary()
"""By optimizer: the step that is accumulated, the one that ends, and what Muon runs on in `orthogonalize`."""


def is_released(optimizer: Any) -> bool:
    """Whether an optimizer is DeepSpeed's own, with gradients on the device."""
    # known: only a class defined in that module has this name; MiCS and a user's subclass are defined elsewhere
    if type(optimizer).__module__ != _STAGE3 or optimizer.offload_optimizer or getattr(optimizer, "zenflow", False):
        return False
    return not _released.others(optimizer, *_FUNCTIONS, packages=("deepspeed",))


def of_a_bucket(optimizer: Any, params: Iterable[Any]) -> Iterable[Any]:
    """The parameters of a bucket that Muon runs on when the bucket is reduced: none if it waits for the step's end."""
    if optimizer in _gathered:
        return _gathered[optimizer]
    waiting = _of_this_step(optimizer)
    if waiting is None:
        return params
    if waiting.whole:
        return ()
    waiting.done = {param.ds_id for param in params}
    return params


def reduced(optimizer: Any, params: list[Any]) -> None:
    """Record a bucket's parameters that Muon has not run on."""
    waiting = _of_this_step(optimizer)
    if waiting is None:
        return
    done, waiting.done = waiting.done, set()
    left = {param.ds_id for param in params if _uses_muon(optimizer, param)} - done
    # Upstream passes a bucket's own list.
    dtype = next((dtype for dtype, bucket in optimizer.ipg_buckets.items() if bucket.params is params), None)
    if left and dtype is not None:
        waiting.params.setdefault(dtype, set()).update(left)


def ended(optimizer: Any) -> None:
    """The step that was accumulated ends; the next gradients are those of another one."""
    _ended.pop(optimizer, None)  # of a step that an overflow has ended
    waiting = _steps.pop(optimizer, None)
    if waiting is not None and waiting.params:
        _ended[optimizer] = waiting


def orthogonalize(optimizer: Any) -> None:
    """Replace the sums over a step by Muon's updates, for the parameters that still wait."""
    waiting = _ended.pop(optimizer, None)
    if waiting is None:
        return
    for dtype in sorted(waiting.params, key=str):  # in the same order on every rank
        for params, sums in _chunks(optimizer, waiting.params[dtype]):
            _run(optimizer, dtype, params, sums)


def _of_this_step(optimizer: Any) -> Waiting | None:
    if not optimizer.use_muon or not is_released(optimizer):
        return None
    number, waiting = optimizer.micro_step_id, _steps.get(optimizer)
    boundary = optimizer.is_gradient_accumulation_boundary  # a method from 0.19.5 on
    whole = number > 0 or not (boundary() if callable(boundary) else boundary)
    if waiting is None or (number == 0 and waiting.whole != whole):
        waiting = _steps[optimizer] = Waiting(whole)
    return waiting


def _uses_muon(optimizer: Any, param: Any) -> bool:
    group, _, _ = optimizer.grad_position[optimizer.get_param_id(param)]
    return bool(optimizer.sub_groups_using_muon[group])


def _chunks(optimizer: Any, ids: set[int]) -> Iterator[tuple[list[Any], list[torch.Tensor]]]:
    """Parameters of one sub-group and one shape, about a bucket's worth, and their sums on this rank.

    The release's function gathers matrices of several ranks at once. gloo refuses it if their shapes differ.
    """
    for number, group in enumerate(optimizer.fp16_groups):
        shapes: dict[tuple[int, ...], list[tuple[Any, torch.Tensor]]] = {}
        for param, part in zip(group, optimizer.averaged_gradients[number], strict=True):
            if param.ds_id in ids:
                shapes.setdefault(tuple(param.ds_shape), []).append((param, part))
        for each in shapes.values():
            count = max(1, optimizer.reduce_bucket_size // each[0][0].ds_numel)
            for start in range(0, len(each), count):
                params, sums = zip(*each[start : start + count], strict=True)
                yield list(params), list(sums)


def _run(optimizer: Any, dtype: torch.dtype, params: list[Any], sums: list[torch.Tensor]) -> None:
    """Run the release's function on these parameters, as on a bucket of them."""
    gathered = optimizer._partitioned_buffers_all_gather(params, sums, optimizer.gradient_accumulation_dtype)
    bucket = torch.cat([whole.reshape(-1) for whole in gathered])
    _gathered[optimizer] = [
        Gathered(param, whole.to(param.dtype)) for param, whole in zip(params, gathered, strict=True)
    ]
    try:
        optimizer._apply_distributed_muon_update(dtype, bucket)
    finally:
        del _gathered[optimizer]
    start = 0
    for param, part in zip(params, sums, strict=True):
        size = param.partition_numel()
        offset = size * dist.get_rank(group=getattr(param, "ds_process_group", optimizer.dp_process_group))
        number = max(0, min(size, param.ds_numel - offset))  # the last ranks' partitions are padded
        if number:
            # writes: the sum becomes the update, as upstream's own function does in a bucket
            part.view(-1).narrow(0, 0, number).copy_(bucket.narrow(0, start + offset, number))
        start += param.ds_numel
