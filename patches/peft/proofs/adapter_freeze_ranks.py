"""Adapters loaded and added to a PEFT model that has one: ``--out DIR``, with a release of PEFT on sys.path.

``rank0.json`` has the result of each trial before apply() of peft-adapter-freeze, after it, and after revert().
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from rlhf_patches.patches.peft.proofs import small
from rlhf_patches.proving import states

NAME = "peft-adapter-freeze"
LAYERS = ["up", "down"]


def lora(layers: list[str] = LAYERS, **more: Any) -> LoraConfig:
    return LoraConfig(r=small.RANK, lora_alpha=small.ALPHA, target_modules=layers, **more)


def saved(config: Any) -> str:
    """A folder with an adapter."""
    folder = states.folder()
    model = get_peft_model(small.Small(), config)
    small.fill(model)
    model.save_pretrained(folder)
    return folder


def policy(config: Any, **options: Any) -> PeftModel:
    """A model with the adapter ``policy`` loaded from disk."""
    return PeftModel.from_pretrained(small.Small(), saved(config), adapter_name="policy", **options)


def trainable(model: torch.nn.Module) -> list[str]:
    """Adapters with trainable parameters, and ``base`` if another parameter is trainable."""
    names = [name for name, flag in small.flags(model).items() if flag]
    adapters = {part for name in names for part in ("policy", "reference") if part in name.split(".")}
    rest = [name for name in names if not adapters & set(name.split("."))]
    return sorted(adapters) + ["base"] * bool(rest)


def a_frozen_reference_is_loaded(config: Any, other: Any = None, name: str = "reference") -> dict[str, Any]:
    """The policy's gradients afterwards, compared with those of the policy alone."""
    model = policy(config, is_trainable=True)
    before = {name for name, flag in small.flags(model).items() if flag}
    model.load_adapter(saved(other or config), adapter_name=name)
    found: dict[str, Any] = {"active": model.active_adapter, "trainable": trainable(model)}
    found["as before"] = before == {name for name, flag in small.flags(model).items() if flag}
    loss = small.loss(model)
    if loss.requires_grad:
        loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    found["norm"] = float(sum(float(g.double().square().sum()) for g in gradients.values()) ** 0.5)
    if isinstance(config, LoraConfig):
        wanted = small.gradients_in_float64(model, "policy")
        found["wanted norm"] = float(sum(float(g.square().sum()) for g in wanted.values()) ** 0.5)
        found["off float64 by"] = max(
            (far(gradients[name], gradient) if name in gradients else 1.0 for name, gradient in wanted.items()),
            default=1.0,
        )
    return found


def far(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


def observe() -> dict[str, Any]:
    return {"LoRA": a_frozen_reference_is_loaded(lora())}


def main(observe: Callable[[], dict[str, Any]] = observe) -> None:
    states.report(NAME, observe, states.parser().parse_args().out)
