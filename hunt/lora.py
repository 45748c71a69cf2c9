"""A small language model with a LoRA adapter, what is done with it, and what a user then has of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from hunt.outcomes import Outcome
from hunt.trainers import CannotRun
from rlhf_patches.proving import states

VOCABULARY, WIDTH, SAMPLES = 16, 8, 8
#: The second one's name begins as the first one's.
MINE, OTHER = "policy", "policy_ref"
LAYERS = ["up", "down"]
KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "dora-conv1d": {"use_dora": True, "target_modules": ["square"], "fan_in_fan_out": True},
    "lora-bias": {"lora_bias": True},
    "embedding": {"target_modules": ["words", "up"]},
    "tied": {"target_modules": ["words", "up", "head"]},
    "modules-to-save": {"modules_to_save": ["head"]},
    "patterns": {"rank_pattern": {"up": 2}, "alpha_pattern": {"down": 3}},
    "bias": {"bias": "lora_only"},
}


class Model(nn.Module):
    """Words, two layers and a head, which may be the words' weight; or one more layer, as GPT-2 has them."""

    def __init__(self, tied: bool, conv1d: bool) -> None:
        super().__init__()
        self.config = {"model_type": "small", "tie_word_embeddings": tied}
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.square = Conv1D(WIDTH, WIDTH) if conv1d else nn.Identity()
        fill(self)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.square(self.words(tokens))
        return self.head(hidden + self.down(self.up(hidden).tanh()))


def fill(module: nn.Module, among: Callable[[str], bool] = lambda _: True, seed: int = 7) -> None:
    """Random values for these parameters, in the order of their names."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, each in sorted(module.named_parameters()):
            if among(name):
                each.copy_(torch.randn(each.shape, generator=generator) * 0.3)


def config(kind: str) -> LoraConfig:
    try:
        return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": LAYERS, **KINDS[kind]})
    except TypeError as error:
        raise CannotRun(f"this release's LoraConfig: {error}") from error


def base(kind: str, dtype: str) -> Model:
    return Model(kind == "tied", kind == "dora-conv1d").to(getattr(torch, dtype))


def policy(kind: str, dtype: str = "float32", fresh: bool = False) -> PeftModel:
    """With an adapter as it is made, or all of whose weights are random."""
    made = get_peft_model(base(kind, dtype), config(kind), adapter_name=MINE)
    if not fresh:
        fill(made, lambda name: f".{MINE}." in f".{name}." or f"_{MINE}" in name, seed=9)
    return made


def tokens() -> torch.Tensor:
    return torch.randint(VOCABULARY, (SAMPLES, 3), generator=torch.Generator().manual_seed(3))


def saved(model: PeftModel) -> Path:
    folder = states.folder()
    model.save_pretrained(folder, selected_adapters=[MINE])
    (file,) = Path(folder).rglob("adapter_model.safetensors")
    return file


def weighted(how: str) -> Callable[[Any, str, dict[str, Any]], Any]:
    def do(model: Any, kind: str, found: dict[str, Any]) -> Any:
        model.add_weighted_adapter([MINE], [1.0], "sum", combination_type=how)
        model.set_adapter("sum")
        return model

    return do


def merge(model: Any, *_: Any) -> None:
    model.merge_adapter()


def unmerge(model: Any, *_: Any) -> None:
    model.unmerge_adapter()


def merge_and_unload(model: Any, *_: Any) -> Any:
    return model.merge_and_unload()


def unload(model: Any, *_: Any) -> Any:
    return model.unload()


def disable(model: Any, _: str, found: dict[str, Any]) -> None:
    found["kept"] = within = model.disable_adapter()
    within.__enter__()


def reference(model: Any, *_: Any) -> None:
    with torch.no_grad(), model.disable_adapter():
        model(tokens())


def freeze(model: Any, *_: Any) -> None:
    for name, each in model.named_parameters():
        if "lora_A" in name or "lora_embedding_A" in name:
            each.requires_grad_(False)


def load_frozen(model: Any, *_: Any) -> None:
    model.load_adapter(saved(model).parent, OTHER)


def add(model: Any, kind: str, _: Any) -> None:
    """Another adapter, which is not active."""
    model.add_adapter(OTHER, config(kind))
    fill(model, lambda name: f".{OTHER}." in f".{name}.", seed=13)


def add_active(model: Any, kind: str, _: Any) -> None:
    """Another adapter, beside the first one; which of them is trained is nothing to what they compute."""
    add(model, kind, _)
    model.base_model.set_adapter([MINE, OTHER])


def to_the_other(model: Any, *_: Any) -> None:
    model.set_adapter(OTHER)


def back(model: Any, *_: Any) -> None:
    model.set_adapter(MINE)


def save_and_load(model: Any, kind: str, _: Any) -> Any:
    return PeftModel.from_pretrained(base(kind, "float32"), saved(model).parent, adapter_name=MINE, is_trainable=True)


def save(model: Any, _: str, found: dict[str, Any]) -> None:
    from safetensors.torch import load_file

    found["file"] = load_file(saved(model))


DOING: dict[str, Callable[..., Any]] = {
    each.__name__.replace("_", " "): each
    for each in (merge, unmerge, merge_and_unload, unload, disable, reference, freeze, load_frozen, add, to_the_other)
    + (back, save_and_load, save, add_active)
} | {f"weighted {how}": weighted(how) for how in ("linear", "cat", "svd")}
"""Each takes the model, the kind, and the outcome; returns another model, or None."""


def own(name: str) -> str:
    """A parameter's name in the base model."""
    for part in ("base_model.model.", "base_layer.", "original_module."):
        name = name.replace(part, "")
    return name


def of(model: Any, found: dict[str, Any]) -> Outcome:
    """Output, loss and gradient, which parameters are trainable, adapters that are active, and the base's weights."""
    logits = model(tokens())
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens().roll(1, 1).flatten())
    if loss.requires_grad:
        loss.backward()
    named = dict(model.named_parameters())
    adapters = {name for name in named if "lora_" in name or "modules_to_save" in name}
    return {
        "output": {"logits": logits},
        "loss": {"step 0": loss},
        "gradient": {name: each.grad for name, each in named.items() if each.grad is not None},
        "flags": {name: str(each.requires_grad) for name, each in named.items() if OTHER not in name},
        "active": {
            name: f"{module.active_adapters}, {'off' if module.disable_adapters else 'on'}"
            for name, module in model.named_modules()
            if hasattr(module, "active_adapters") and hasattr(module, "disable_adapters")
        },
        "modes": {name: str(module.training) for name, module in model.named_modules() if OTHER not in name},
        "base": {own(name): each for name, each in named.items() if name not in adapters},
        "file": found.get("file", {}),
    }


def margin(model: Any, policy: PeftModel, given: torch.Tensor, reference: str) -> torch.Tensor:
    """As DPO has it: how far the policy's score of each sample is from the reference's."""

    def score() -> torch.Tensor:
        return model(given).square().mean((1, 2))

    def of_the_reference() -> torch.Tensor:
        with torch.no_grad(), policy.disable_adapter():
            return score()

    first = of_the_reference() if reference == "first" else None
    mine = score()
    return (mine - (of_the_reference() if first is None else first)).square().mean()


def gradients(model: nn.Module) -> dict[str, Any]:
    named = model.named_parameters()
    return {
        name.replace("_fsdp_wrapped_module.", ""): each.grad.clone()
        for name, each in named
        if each.requires_grad and each.grad is not None
    }
