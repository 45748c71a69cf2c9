"""Parameters that DeepSpeed ZeRO-3 has partitioned: gathering them for a direct read, and partitioning them again.

This module does not import DeepSpeed: a parameter of ZeRO-3 carries all required attributes, and other parameters have
none of them. ``gathered_here`` are the parameters that this module has gathered, and so has to partition again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def is_zero3(parameter: Any) -> bool:
    """Whether DeepSpeed ZeRO-3 manages this parameter."""
    return hasattr(parameter, "ds_status")


def gather(*heads: Iterable[Any]) -> list[Any]:
    """Gather the partitioned parameters of each head (weight and bias), with one collective per head, and return them.

    Every rank must call this at the same point: what is partitioned on one rank is partitioned on all.

    Raises:
        RuntimeError: DeepSpeed is fetching a parameter, and only the module that it fetches for can wait for it.
    """
    heads = tuple([parameter for parameter in head if is_zero3(parameter)] for head in heads)
    in_flight = [parameter.ds_id for head in heads for parameter in head if parameter.ds_status.name == "INFLIGHT"]
    if in_flight:
        raise RuntimeError(
            f"DeepSpeed is prefetching the output head (ds_id {in_flight}) for a module, and its weight is read "
            "directly at the same time; set stage3_prefetch_bucket_size to 0"
        )
    gathered_here: list[Any] = []
    try:
        for head in heads:
            gathered_here += _gather_one(head)
    except BaseException:
        release(gathered_here)
        raise
    return gathered_here


def _gather_one(head: Iterable[Any]) -> list[Any]:
    gathered_here = [parameter for parameter in head if parameter.ds_status.name == "NOT_AVAILABLE"]
    if len(gathered_here) > 1 and not any(
        hasattr(parameter.ds_tensor, "ds_quant_scale") for parameter in gathered_here
    ):
        # all_gather() launches one collective for each parameter. Before DeepSpeed 0.19 it waits only for the last
        # one, which on gloo is not enough.
        # waits: for the collective, as every use of a partitioned parameter does, within the process group's timeout
        gathered_here[0].all_gather_coalesced(gathered_here).wait()
    elif gathered_here:
        gathered_here[0].all_gather(param_list=gathered_here)
    return gathered_here


def release(gathered_here: Iterable[Any]) -> None:
    """Partition the parameters that `gather` returned, except those that a DeepSpeed module has since taken over."""
    for parameter in gathered_here:
        if parameter.ds_status.name == "AVAILABLE" and not parameter.ds_active_sub_modules:
            parameter.partition()


@contextmanager
def gathered(*heads: Iterable[Any]) -> Iterator[None]:
    """`gather` on entry, `release` on exit, even if the body raises."""
    gathered_here = gather(*heads)
    try:
        yield
    finally:
        release(gathered_here)


def release_after_accumulation(parameter: Any) -> None:
    """Within a backward pass: `release` as soon as autograd has accumulated the parameter's gradient.

    Not earlier: autograd lays a gradient out like the parameter at that moment, and a partitioned one is empty.
    DeepSpeed's own hook, which reduces the gradient, was registered first and so has run as well.
    """
    undone = [parameter]

    def let_go(*_: Any) -> None:
        handle.remove()
        while undone:
            release([undone.pop()])

    # writes: a hook of ours, gone when the backward pass is
    handle = parameter.register_post_accumulate_grad_hook(let_go)
    # The hook does not run if an exception comes before it, nor with torch.autograd.grad. Autograd drops its callbacks
    # with the backward pass, however that ends, and so the last reference to `end`.
    end = _End()
    weakref.finalize(end, let_go).atexit = False
    torch.autograd.Variable._execution_engine.queue_callback(end)


class _End:
    """Called by autograd at the end of a backward pass that succeeded; dropped at the end of any."""

    def __call__(self) -> None:
        """Do nothing: the finalizer runs when autograd drops this object."""
