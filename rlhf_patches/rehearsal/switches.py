"""Gradient checkpointing, compiled model: the gradient with them is the gradient without them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from . import states, window
from .relation import Relation, Verdict

CHECKPOINTING, COMPILED = "gradient checkpointing", "compiled model"
_FLAG = "gradient_checkpointing"
_GIGABYTE = 1e9


def checkpoints(model: torch.nn.Module) -> bool:
    """Whether transformers checkpoints a layer of the model."""
    return bool(_flags(model))


def compiles(model: torch.nn.Module) -> bool:
    """Whether the model, or a part of it, is compiled."""
    names = ("_orig_mod", "_compiled_call_impl")
    return any(getattr(each, name, None) is not None for each in model.modules() for name in names)


def without_checkpointing(model: torch.nn.Module) -> AbstractContextManager[bool]:
    """Disable transformers' checkpointing within the context; its functions and hooks stay."""
    return states.zeroed(_flags(model))


def _flags(model: torch.nn.Module) -> list[tuple[dict[str, Any], str]]:
    return [(vars(each), _FLAG) for each in model.modules() if vars(each).get(_FLAG) is True]


def compiled_off() -> AbstractContextManager[Any]:
    """Run compiled code as it is written within the context."""
    made: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return made


def without_memory(device: torch.device, model: torch.nn.Module, loss: Callable[[], Any]) -> str:
    """Return why a loss's activations may not fit into memory; empty if they fit.

    It computes the loss, and counts what autograd saves without keeping it.
    """
    if device.type == "cpu":
        return ""
    if device.type != "cuda":
        return f"the free memory of {device.type} is not known"
    free = torch.cuda.mem_get_info(device)[0]
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    with counted(model) as number:
        loss()
    if number[0] <= free:
        return ""
    return f"without it the micro-batch may need {number[0] / _GIGABYTE:.1f} GB, and {free / _GIGABYTE:.1f} GB are free"


@contextlib.contextmanager
def counted(model: torch.nn.Module) -> Iterator[list[int]]:
    """Count within the context the bytes that autograd saves, without the parameters; no backward pass is possible."""
    parameters = {each.data_ptr() for each in model.parameters()}
    number = [0]

    def noted(tensor: torch.Tensor) -> None:
        if tensor.data_ptr() not in parameters:
            number[0] += tensor.numel() * tensor.element_size()

    with torch.autograd.graph.saved_tensors_hooks(noted, lambda _: None):
        yield number


def judge(name: str, used: torch.Tensor, plain: torch.Tensor, noise: float) -> Relation:
    """Compare the run's gradient of a micro-batch with the one without the feature."""
    size = float(plain.norm()) or 1.0
    apart = float((used - plain).norm()) / size
    if apart <= window.limit(noise):
        return Relation(name, Verdict.HOLDS, f"{apart:.0e}", f"the gradient without it (noise {noise:.0e})")
    what = {CHECKPOINTING: "without checkpointing", COMPILED: "of the model as it is written"}[name]
    text = f"relative gradient error: the gradient is not that {what} (a part of {float(used @ plain) / size**2:.3f})"
    return Relation(name, Verdict.DEVIATES, f"{apart:.2g}", text)
