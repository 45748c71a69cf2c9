"""Relations of PEFT's adapters: what is trained, which layers have one, what is saved, what a merge leaves behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from ..definitions.words import plural
from . import window
from .parameters import shown
from .relation import Relation, Verdict

NAME = "adapters"
_LOW = (torch.bfloat16, torch.float16)
_NUMBERS_OF_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_TRIED = 0.01
"""A value of LoRA's B, which begins at 0, for a merge."""


def relation(model: torch.nn.Module, *, sharded: bool = False, merges: bool = False) -> Relation | None:
    """Check a model's adapters; None if it has none.

    Args:
        model: the model, without wrappers of distributed training.
        sharded: whether parameters are sharded; then nothing is merged, and no file is compared.
        merges: whether the run merges its adapters, to synchronize weights with a rollout engine.
    """
    layers = dict(_layers(model))
    configs: dict[str, Any] = getattr(model, "peft_config", {})
    if not layers or not configs:
        return None
    active = [each for each in configs if any(each in layer.active_adapters for layer in layers.values())]
    wrong = [*_frozen(layers, configs, active), *_misplaced(model, layers, configs)]
    if not sharded:
        wrong += _strangers(model, layers, configs, active)
        wrong += _drift(layers) if merges else ()
    verdict = Verdict.DEVIATES if wrong else Verdict.HOLDS
    number = plural(len(layers), "layer", "layers")
    return Relation(NAME, verdict, f"{', '.join(active)} on {number}", "; ".join(wrong))


def _layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the modules that have adapters, by name."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is not None:
        for name, module in model.named_modules():
            if isinstance(module, tuners.BaseTunerLayer):
                yield name, module


def _parameters(layer: Any, adapter: str) -> list[torch.nn.Parameter]:
    """Return the parameters of one adapter in a layer."""
    found = []
    for name in layer.adapter_layer_names:
        parts = getattr(layer, name, None)
        if isinstance(parts, (torch.nn.ModuleDict, torch.nn.ParameterDict)) and adapter in parts:
            part = parts[adapter]
            found += [part] if isinstance(part, torch.nn.Parameter) else [*part.parameters()]
    return found


def _frozen(layers: dict[str, Any], configs: dict[str, Any], active: list[str]) -> Iterator[str]:
    """An active adapter that was made for training must not be frozen as a whole."""
    for adapter in active:
        own = [each for layer in layers.values() for each in _parameters(layer, adapter)]
        if own and not configs[adapter].inference_mode and not any(each.requires_grad for each in own):
            yield f"the active adapter {adapter} was made for training, and is frozen"


def _misplaced(model: torch.nn.Module, layers: dict[str, Any], configs: dict[str, Any]) -> Iterator[str]:
    """Experts with an adapter must be in the layers that ``layers_to_transform`` names."""
    for adapter, config in configs.items():
        chosen = getattr(config, "layers_to_transform", None)
        if chosen is None or getattr(config, "layers_pattern", None) or isinstance(config.target_modules, str):
            continue
        wanted = {chosen} if isinstance(chosen, int) else {*chosen}
        places = {name: _place(model, name) for name, layer in layers.items() if _parameters(layer, adapter)}
        outside = [name for name, place in places.items() if place is not None and place not in wanted]
        if wanted and outside:
            text = f"{len(outside)} of {len(places)} adapted modules of {adapter} are in other layers"
            yield f"{text} than layers_to_transform ({shown(map(str, sorted(wanted)))}): {shown(outside)}"


def _place(model: torch.nn.Module, name: str) -> int | None:
    """Return the number of an expert's layer; None of a module that is no expert, or of an unknown model."""
    config = getattr(model, "config", None)
    lists, module = [], model
    for part in name.split("."):
        if isinstance(module, torch.nn.ModuleList) and part.isdecimal():
            lists.append((len(module), int(part)))
        module = getattr(module, part)
    if len(lists) != 2 or lists[0][0] != getattr(config, "num_hidden_layers", None):
        return None
    return lists[0][1] if lists[1][0] in [getattr(config, each, None) for each in _NUMBERS_OF_EXPERTS] else None


def _strangers(
    model: torch.nn.Module, layers: dict[str, Any], configs: dict[str, Any], active: list[str]
) -> Iterator[str]:
    """A file of a LoRA adapter must not have another adapter's parameters."""
    for adapter in active:
        if str(getattr(configs[adapter].peft_type, "value", "")) not in ("LORA", "ADALORA"):
            continue
        places = {
            each.data_ptr(): other
            for other in configs
            if other != adapter
            for layer in layers.values()
            for each in _parameters(layer, other)
            if each.numel()
        }
        if not places:
            continue
        file = saved(model, adapter)
        found = [places[each.data_ptr()] for each in file.values() if each.data_ptr() in places]
        if found:
            yield f"{len(found)} of {len(file)} saved tensors of {adapter} belong to {shown(sorted({*found}))}"


def saved(model: torch.nn.Module, adapter: str) -> dict[str, torch.Tensor]:
    """Return what PEFT would write into an adapter's file."""
    from peft import get_peft_model_state_dict

    made: dict[str, torch.Tensor] = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    return made


def _drift(layers: dict[str, Any]) -> Iterator[str]:
    """A merge of LoRA adapters and its reverse must not change the base weights."""
    lora = sys.modules.get("peft.tuners.lora.layer")
    changed, most = 0, 0.0
    for layer in layers.values():
        if lora is None or type(layer) is not lora.Linear or layer.merged or layer.disable_adapters:
            continue
        weight = layer.get_base_layer().weight
        if type(layer.get_base_layer()) is torch.nn.Linear and weight.dtype in _LOW:
            apart = _merged_and_back(layer, weight)
            changed, most = changed + (apart > window.FLOOR), max(most, apart)
    if changed:
        number = plural(changed, "layer", "layers")
        yield f"each merge and its reverse change the base weights of {number} by up to {most:.0e}"


def _merged_and_back(layer: Any, weight: torch.Tensor) -> float:
    """Return the relative change of a base weight by a merge and its reverse, and restore what they changed."""
    parameters = [each for adapter in layer.active_adapters for each in _parameters(layer, adapter)]
    before, kept = weight.detach().clone(), [each.detach().clone() for each in parameters]
    with torch.no_grad():
        try:
            for each in parameters:
                if not bool(each.any()):
                    each.fill_(_TRIED)
            layer.merge()
            layer.unmerge()
            return float((layer.get_base_layer().weight - before).float().norm() / before.float().norm())
        finally:
            layer.get_base_layer().weight.copy_(before)
            for each, value in zip(parameters, kept, strict=True):
                each.copy_(value)
