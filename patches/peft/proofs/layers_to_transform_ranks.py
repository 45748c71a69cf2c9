"""The modules of real models that PEFT adapts for ``layers_to_transform``, and the right ones: ``--out FOLDER``.

Each case before apply() of peft-layers-to-transform, after it, and after revert(). transformers 4's mixtures have
their experts as modules.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from rlhf_patches.proving import states

NAME = "peft-layers-to-transform"
EXPERTS = ["w1", "w2", "w3"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "one layer": ("mixture", {"layers_to_transform": [1], "target_modules": EXPERTS}),
    "a number": ("mixture", {"layers_to_transform": 0, "target_modules": EXPERTS}),
    "two layers": ("mixture", {"layers_to_transform": [0, 2], "target_modules": [*EXPERTS, "q_proj"]}),
    "attention": ("mixture", {"layers_to_transform": [1], "target_modules": ["q_proj", "v_proj"]}),
    "a pattern": ("mixture", {"layers_to_transform": [1], "layers_pattern": "layers", "target_modules": EXPERTS}),
    "experts by a pattern": (
        "mixture",
        {"layers_to_transform": [1], "layers_pattern": ["experts"], "target_modules": EXPERTS},
    ),
    "all": ("mixture", {"target_modules": EXPERTS}),
    "members": ("members", {"layers_to_transform": [2], "target_modules": ["q_proj"]}),
    "another member": ("members", {"layers_to_transform": [1], "target_modules": ["q_proj"]}),
    "members' pattern": (
        "members",
        {"layers_to_transform": [2], "layers_pattern": "layers", "target_modules": ["q_proj"]},
    ),
    "T5": ("t5", {"layers_to_transform": [1], "target_modules": ["wi", "q"]}),
    "dense": ("dense", {"layers_to_transform": [1], "target_modules": ["q_proj", "up_proj"]}),
}
WRONG = ("one layer", "a number", "two layers")


def model(kind: str) -> Any:
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
        T5Config,
        T5ForConditionalGeneration,
    )

    sizes = {"vocab_size": 8, "hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 1, "num_key_value_heads": 1}
    if kind == "t5":
        return T5ForConditionalGeneration(T5Config(vocab_size=8, d_model=4, d_kv=4, d_ff=4, num_layers=3, num_heads=1))
    if kind == "members":
        members = [LlamaForCausalLM(LlamaConfig(**sizes)).model for _ in range(2)]
        return torch.nn.ModuleDict({"net": torch.nn.ModuleDict({"members": torch.nn.ModuleList(members)})})
    if kind == "dense":
        return LlamaForCausalLM(LlamaConfig(**sizes))
    return MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=2))


def right(kind: str, settings: dict[str, Any]) -> list[str]:
    """By the names alone: the number after ``layers``, T5's ``layer``, or the pattern."""
    layers = settings.get("layers_to_transform", [0, 1, 2])
    behind = settings.get("layers_pattern") or ("layer" if kind == "t5" else "layers")
    behind = behind if isinstance(behind, str) else behind[0]
    found = []
    for name, module in model(kind).named_modules():
        number = re.search(rf"\.{behind}\.([0-9]+)\.", f".{name}.")
        wanted = layers if isinstance(layers, list) else [layers]
        if isinstance(module, torch.nn.Linear) and number and name.rpartition(".")[2] in settings["target_modules"]:
            found += [name] * (int(number[1]) in wanted)
    return sorted(found)


def adapted(kind: str, settings: dict[str, Any]) -> list[str]:
    from peft import LoraConfig, get_peft_model

    made = get_peft_model(model(kind), LoraConfig(r=1, **settings))
    names = (name for name, _ in made.named_modules() if name.endswith(".lora_A"))
    return sorted(name.removeprefix("base_model.model.").removesuffix(".lora_A") for name in names)


def loaded() -> dict[str, Any]:
    """An adapter of one expert in each layer, as the bug creates it, loaded with the patch and without."""
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    kind, settings = CASES["one layer"]
    made = get_peft_model(model(kind), LoraConfig(r=1, **settings))
    names = [f"model.layers.{layer}.block_sparse_moe.experts.1.{name}" for layer in range(3) for name in EXPERTS]
    state: dict[str, Any] = {}
    for name in names:
        state |= {f"base_model.model.{name}.lora_A.weight": torch.ones(1, 4)}
        state |= {f"base_model.model.{name}.lora_B.weight": torch.ones(4, 1)}
    incompatible = set_peft_model_state_dict(made, state)
    return {"unexpected": len(incompatible.unexpected_keys)}


def main() -> None:
    def observe() -> dict[str, Any]:
        found = {case: {"adapted": adapted(*given), "right": right(*given)} for case, given in CASES.items()}
        return {**found, "loaded": loaded()}

    states.report(NAME, observe, states.parser().parse_args().out)
