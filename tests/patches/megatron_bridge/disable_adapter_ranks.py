"""Megatron-Bridge's LoRA on a small model, and its ``disable_adapter``: ``--out DIR``.

``rank0.json`` has what each trial gave before apply() of megatron-bridge-disable-adapter, after it, and after revert().
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from tests.harness import megatron_on_cpu

megatron_on_cpu.install()
from tests.harness import absent_packages

absent_packages.install()
import torch
from megatron.bridge.peft.lora import LoRA

from rlhf_patches.patches.peft.proofs import small
from rlhf_patches.proving import states
from rlhf_patches.testing import untouched

NAME = "megatron-bridge-disable-adapter"


def policy(chunks: int = 1) -> tuple[Any, list[Any]]:
    """The release's LoRA, and the model's chunks with its adapters."""
    lora = LoRA(target_modules=["up", "down"], dim=small.RANK, alpha=small.ALPHA)
    models = [small.Small() for _ in range(chunks)]
    lora(models if chunks > 1 else models[0])
    for model in models:
        small.fill(model)
    return lora, models


def given(models: list[Any]) -> Any:
    """As the release takes them."""
    return models if len(models) > 1 else models[0]


def far_from_base(model: torch.nn.Module) -> float:
    """How far the outputs are from those of the base model, in float64 and without an adapter."""
    values = {name: value.detach().double() for name, value in model.named_parameters()}
    hidden = torch.tanh(small.batch().double() @ values["up.weight"].T + values["up.bias"])
    wanted = hidden @ values["down.weight"].T + values["down.bias"]
    wanted = wanted @ values["head.weight"].T + values["head.bias"]
    with torch.no_grad():
        return float((model(small.batch()).double() - wanted).abs().max() / wanted.abs().max())


def after_an_inner_context(raising: bool = False, chunks: int = 1) -> dict[str, float]:
    lora, models = policy(chunks)
    found = {"before": far_from_base(models[-1])}
    with lora.disable_adapter(given(models)):
        found["outer"] = far_from_base(models[-1])
        with contextlib.suppress(MemoryError), lora.disable_adapter(given(models)):
            if raising:
                raise MemoryError
        found["outer, after inner"] = far_from_base(models[-1])
    found["after"] = far_from_base(models[-1])
    return found


def off_before() -> dict[str, float]:
    lora, (model,) = policy()
    lora.disable_adapter_layers(model)
    with lora.disable_adapter(model):
        pass
    return {"after": far_from_base(model)}


def one_layer_off() -> list[bool]:
    lora, (model,) = policy()
    model.up.disable_adapter_layers()
    with lora.disable_adapter(model):
        pass
    return [model.up._adapter_enabled, model.down._adapter_enabled]


def what_else_the_release_takes() -> dict[str, Any]:
    """Models in a dictionary; a layer of somebody's own that has the flag, and nothing to switch it with."""
    lora, models = policy(2)
    named = dict(zip("ab", models, strict=True))
    lora.disable_adapter_layers(models[1])
    with lora.disable_adapter(named):
        within = far_from_base(models[0])
    lora, (model,) = policy()
    model.foreign = torch.nn.Identity()
    model.foreign._adapter_enabled = False
    with untouched(model), lora.disable_adapter(model=model):
        pass
    return {"within": within, "after": [far_from_base(each) for each in models]}


def observe() -> dict[str, Any]:
    trials: dict[str, Callable[[], Any]] = {
        "inner": after_an_inner_context,
        "inner raises": lambda: after_an_inner_context(raising=True),
        "two chunks": lambda: after_an_inner_context(chunks=2),
        "off before": off_before,
        "one layer off": one_layer_off,
        "what else": what_else_the_release_takes,
    }
    return {name: trial() for name, trial in trials.items()}


def main() -> None:
    states.report(NAME, observe, states.parser().parse_args().out)
