"""One of several adapters saved: ``--out DIR``, with a release of PEFT on sys.path.

``rank0.json`` has the result of each trial before apply() of peft-save-adapter-prefix, after it, and after revert().
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import IA3Config, LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file

from rlhf_patches.patches.peft.proofs import small
from rlhf_patches.proving import states
from rlhf_patches.testing import untouched

NAME = "peft-save-adapter-prefix"
#: The second's name contains the first's, the third has the name of a module of the base model.
ADAPTERS = ("policy", "policy_ref", "up")


def lora(**more: Any) -> LoraConfig:
    return LoraConfig(r=small.RANK, target_modules=["up", "down"], **more)


def model_with(config: Any, *adapters: str) -> Any:
    first, *others = adapters
    model = get_peft_model(small.Small(), config, adapter_name=first)
    for other in others:
        model.add_adapter(other, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            owner = next((number for number, each in enumerate(ADAPTERS) if name.split(".")[-2:-1] == [each]), 9)
            parameter.fill_(owner)
    return model


def saved(model: Any, adapter: str) -> dict[str, torch.Tensor]:
    """The file's content."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, selected_adapters=[adapter])
        (file,) = Path(folder).rglob("adapter_model.safetensors")
        return load_file(file)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def observe_one(config: Any, adapter: str) -> dict[str, Any]:
    """Compared with a model that has only this adapter, with the same values."""
    together, alone = model_with(config, *ADAPTERS), model_with(config, adapter)
    file, wanted = saved(together, adapter), saved(alone, adapter)
    gathered = {key: value + 1 for key, value in together.state_dict().items()}
    given = get_peft_model_state_dict(together, state_dict=gathered, adapter_name=adapter)
    return {
        "superfluous": sorted(file.keys() - wanted.keys()),
        "missing": sorted(wanted.keys() - file.keys()),
        "same": same(file, wanted),
        "same from a state dict": same(given, {key: value + 1 for key, value in wanted.items()}),
    }


class OnlyKeys:
    """A state dict with only keys and values, which is all that PEFT needs."""

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        self.values = values

    def __iter__(self) -> Any:
        return iter(self.values)

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.values[key]


def given() -> dict[str, Any]:
    """The saved part of a given state dict, and the effect on that dict and on the model."""
    model = model_with(lora(), *ADAPTERS)
    gathered = model.state_dict()
    said = None
    try:
        with untouched(model, gathered, contents=True):
            found = get_peft_model_state_dict(model, gathered, adapter_name="policy")
    except AssertionError as error:
        said = str(error)
    other = get_peft_model_state_dict(model, OnlyKeys(gathered), adapter_name="policy")
    return {"touched": said, "a dictionary": sorted(found), "a mapping": sorted(other)}


def observe() -> dict[str, Any]:
    configs = {"LoRA": lora(), "with a head": lora(modules_to_save=["head"])}
    ia3 = IA3Config(target_modules=["up", "down"], feedforward_modules=["down"])
    return {
        **{name: {each: observe_one(config, each) for each in ADAPTERS} for name, config in configs.items()},
        "only one": sorted(saved(model_with(lora(bias="all"), "policy"), "policy")),
        **given(),
        "IA3": sorted(saved(model_with(ia3, *ADAPTERS), "policy")),
    }


def main() -> None:
    states.report(NAME, observe, states.parser().parse_args().out)
