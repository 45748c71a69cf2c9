"""Adapters that are loaded beside others: ``--out DIR``, with a release of PEFT on sys.path.

As the proof of peft-adapter-freeze: more kinds of adapters, and those that stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from peft import IA3Config, get_peft_model, inject_adapter_in_model

from rlhf_patches.patches.peft.proofs import adapter_freeze_ranks, small
from rlhf_patches.patches.peft.proofs.adapter_freeze_ranks import (
    LAYERS,
    a_frozen_reference_is_loaded,
    lora,
    policy,
    saved,
    trainable,
)


def ia3(**more: Any) -> IA3Config:
    return IA3Config(target_modules=LAYERS, feedforward_modules=["down"], **more)


def of_numbered_layers() -> dict[str, Any]:
    """A reference called "1", of a model with layers "0" and "1"."""
    layers = torch.nn.ModuleDict({number: torch.nn.Linear(4, 4) for number in "01"})
    base = torch.nn.ModuleDict({"layers": layers})
    model = get_peft_model(base, lora(["0", "1"]), adapter_name="policy")
    policy = sorted(name for name, flag in small.flags(model).items() if flag)
    model.add_adapter("1", lora(["0", "1"], inference_mode=True))
    return {"policy": policy, "trainable": sorted(name for name, flag in small.flags(model).items() if flag)}


def uni_lora() -> Any:
    """One trainable vector for all layers, which is there before `inject_adapter`; None where PEFT has no UniLoRA."""
    import peft

    if not hasattr(peft, "UniLoraConfig"):
        return None
    config = {"target_modules": LAYERS, "theta_d_length": 8, "r": 2}
    model = get_peft_model(small.Small(), peft.UniLoraConfig(**config), adapter_name="policy")
    model.add_adapter("reference", peft.UniLoraConfig(**config, inference_mode=True))
    return trainable(model)


def switched(config: Any) -> list[list[str]]:
    """Trainable after set_adapter to the reference, and back."""
    model = policy(config, is_trainable=True)
    model.load_adapter(saved(config), adapter_name="reference")
    found = []
    for adapter in ("reference", "policy"):
        model.set_adapter(adapter)
        found.append(trainable(model))
    return found


def a_trainable_one_is_loaded(config: Any) -> list[str]:
    """Onto a frozen active one."""
    model = policy(config)
    model.load_adapter(saved(config), adapter_name="reference", is_trainable=True)
    return trainable(model)


def one_is_added(config: Any) -> list[str]:
    """Without weights, onto a frozen active one."""
    model = policy(config)
    model.add_adapter("reference", config)
    return trainable(model)


def injected_into_a_model(config: Any) -> list[list[str]]:
    """By inject_adapter_in_model, which transformers' models use: the new one becomes the active one."""
    model = small.Small()
    found = []
    for adapter in ("policy", "reference"):
        model = inject_adapter_in_model(config, model, adapter)
        found.append(trainable(model))
    return found


def one_that_fails() -> dict[str, Any]:
    """PEFT has replaced the first layer when it comes to one that it cannot adapt."""
    model = policy(lora(), is_trainable=True)
    before = small.flags(model)
    try:
        model.add_adapter("reference", lora(["up", "activation"], inference_mode=True))
    except ValueError as error:
        after = small.flags(model)
        return {"raised": str(error), "as before": all(after[name] == flag for name, flag in before.items())}
    return {}


def observe() -> dict[str, Any]:
    config = lora()
    return {
        "LoRA": a_frozen_reference_is_loaded(config),
        "with a head": a_frozen_reference_is_loaded(lora(modules_to_save=["head"])),
        "other layers": a_frozen_reference_is_loaded(config, lora(["head"])),
        "IA3": a_frozen_reference_is_loaded(ia3()),
        "called as a container": a_frozen_reference_is_loaded(config, name="lora_A"),
        "numbered": of_numbered_layers(),
        "switched": switched(config),
        "trainable onto frozen": a_trainable_one_is_loaded(config),
        "added onto frozen": one_is_added(config),
        "injected": injected_into_a_model(config),
        "failed": one_that_fails(),
        "UniLoRA": uni_lora(),
    }


def main() -> None:
    adapter_freeze_ranks.main(observe)
