"""Gradients of keys and values that later layers share, under reentrant gradient checkpointing."""

from __future__ import annotations

import functools
from collections import UserDict
from collections.abc import Callable
from typing import Any

import torch

from .._released import is_released, left

NAME = "transformers-shared-kv-gradient"


class Kept(tuple[torch.Tensor, ...]):
    """A layer's keys and values without their graph, which collect gradients for the layer's second run."""

    __slots__ = ()


class _Collected(torch.autograd.Function):  # type: ignore[misc]
    """The attention's output as it is; backward, the states' own gradients are those that were collected."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, kept: Kept, *states: torch.Tensor) -> torch.Tensor:
        ctx.kept = kept
        return output.clone()  # a view would raise if somebody changed it in place

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        collected = [each.grad for each in ctx.kept]
        for each in ctx.kept:
            each.grad = None  # writes: to tensors of this patch; a second backward pass collects again
        return (*gradients, None, *collected)


def attention_of(layer: Any, states: Any) -> Callable[..., Any]:
    """The layer's attention; under reentrant checkpointing, with what the gradients of stored states need.

    Reentrant checkpointing runs a layer without a graph, and again with one in the backward pass.
    """
    attention: Callable[..., Any] = layer.self_attn
    if not _stores(layer, states):
        return attention
    if torch.is_grad_enabled():
        return functools.partial(with_collected, attention, states) if computed_again(layer, states) else attention
    if not (layer.training and getattr(layer, "gradient_checkpointing", False)) or torch.is_inference_mode_enabled():
        return attention
    if not is_released(getattr(attention, "forward", None)):
        left(NAME, f"{type(attention).__name__}.forward")
        return attention
    return functools.partial(without_graph, attention, states)


def computed_again(self: Any, shared_kv_states: Any) -> bool:
    """Layer: whether it runs in the backward pass, and gradients of what it stores have been collected."""
    return _stores(self, shared_kv_states) and any(type(each) is Kept for each in shared_kv_states.values())


def _stores(layer: Any, states: Any) -> bool:
    return isinstance(states, (dict, UserDict)) and bool(getattr(layer.self_attn, "store_full_length_kv", False))


def without_graph(attention: Callable[..., Any], states: Any, /, **given: Any) -> Any:
    """The run without a graph: states that it stores collect gradients."""
    before = dict(states)
    output = attention(**given)
    if not given.get("return_shared_kv_states"):
        for key, stored in list(states.items()):
            if stored is not before.get(key) and all(isinstance(each, torch.Tensor) for each in stored):
                states[key] = Kept(each.detach().requires_grad_() for each in stored)  # writes: what is stored
    return output


def with_collected(attention: Callable[..., Any], states: Any, /, **given: Any) -> Any:
    """The run with a graph: what was collected is added to the gradients of the states."""
    before = dict(states)
    output = attention(**given)
    for key, kept in before.items():
        if type(kept) is Kept and states[key] is not kept:
            output = (_Collected.apply(output[0], kept, *states[key]), *output[1:])
            states[key] = kept  # writes: as it was, so that another backward pass collects again
    return output
