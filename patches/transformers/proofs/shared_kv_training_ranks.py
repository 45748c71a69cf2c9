"""Gradients of transformers' models whose layers share keys and values, without a cache: ``--out FOLDER [CASE ...]``.

Each case before apply() of transformers-shared-kv-training, after it, and after revert(). The reference is a forward
pass with a cache, in which layers share as released, in float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers

from rlhf_patches.patches.transformers.proofs.shared_kv_gradient_ranks import (
    bits,
    gradients,
    loss_of,
    off,
)
from rlhf_patches.patches.transformers.proofs.shared_kv_gradient_ranks import made as made_of
from rlhf_patches.patches.transformers.proofs.shared_kv_gradient_ranks import main as report

NAME = "transformers-shared-kv-training"
FAMILIES = ("Gemma3n", "Gemma4")
# 4.54 and 4.55 read a sliding window of the cache.
WIDE = {"sliding_window": 16}


def made(family: str, **more: Any) -> Any:
    return made_of(family, **WIDE, **more)


@functools.cache
def by_cache(family: str) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss, and the gradients of the parameters that it depends on."""
    model = made(family).double().eval()
    loss = loss_of(model, use_cache=True)
    loss.backward()
    return loss.item(), {name: each for name, each in gradients(model).items() if each.norm() > 0}


def compared(family: str, model: Any, loss: torch.Tensor) -> dict[str, Any]:
    """Gradients compared with the cache's, and the largest of a parameter that the loss does not depend on."""
    wanted, reference = by_cache(family)
    found = gradients(model)
    others = [float(each.abs().max()) for name, each in found.items() if name not in reference]
    return {
        "gradient": off({name: each for name, each in found.items() if name in reference}, reference),
        "loss": abs(loss.item() - wanted),
        "of others": max(others, default=0.0),
        "parameters": len(reference),
        "bits": bits(model, loss),
    }


def trained(family: str, checkpointing: bool | None = None, **more: Any) -> dict[str, Any]:
    """In training, without checkpointing (None), or with reentrant (True) or other checkpointing."""
    model = made(family, **more)
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    loss = loss_of(model)
    loss.backward()
    return compared(family, model, loss)


def cases() -> dict[str, Callable[[], Any]]:
    """The observations, by name; for the families that this release of transformers has."""
    found: dict[str, Callable[[], Any]] = {}
    for family in FAMILIES:
        if hasattr(transformers, f"{family}ForCausalLM"):
            found[family] = functools.partial(trained, family)
            found[f"{family}, checkpointing"] = functools.partial(trained, family, False)
            found[f"{family}, reentrant"] = functools.partial(trained, family, True)
    return found


def main(known: dict[str, Callable[[], Any]] | None = None) -> None:
    report(known or cases(), NAME)
