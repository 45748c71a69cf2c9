"""Adapters loaded and added to a PEFT model that has one: ``--out DIR``, with a release of PEFT on sys.path.

``rank0.json`` has what each trial gave before apply() of peft-adapter-freeze, after it, and after revert().
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model

from rlhf_patches.patches.peft.proofs import small
from rlhf_patches.proving import states

NAME = "peft-adapter-freeze"
LAYERS = ["up", "down"]


def lora(layers: list[str] = LAYERS, **more: Any) -> LoraConfig:
    return LoraConfig(r=small.RANK, lora_alpha=small.ALPHA, target_modules=layers, **more)


def ia3(**more: Any) -> IA3Config:
    return IA3Config(target_modules=LAYERS, feedforward_modules=["down"], **more)


def saved(config: Any) -> str:
    """A folder with an adapter."""
    folder = tempfile.mkdtemp()
    model = get_peft_model(small.Small(), config)
    small.fill(model)
    model.save_pretrained(folder)
    return folder


def policy(config: Any, **options: Any) -> PeftModel:
    """A model with the adapter ``policy`` loaded from disk."""
    return PeftModel.from_pretrained(small.Small(), saved(config), adapter_name="policy", **options)


def trainable(model: torch.nn.Module) -> list[str]:
    """Adapters with trainable parameters, and ``base`` if another parameter is."""
    names = [name for name, flag in small.flags(model).items() if flag]
    adapters = {part for name in names for part in ("policy", "reference") if part in name.split(".")}
    rest = [name for name in names if not adapters & set(name.split("."))]
    return sorted(adapters) + ["base"] * bool(rest)


def a_frozen_reference_is_loaded(config: Any, other: Any = None, name: str = "reference") -> dict[str, Any]:
    """The policy's gradients afterwards, against those of the policy alone."""
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


def far(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


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
    states.report(NAME, observe, states.parser().parse_args().out)
