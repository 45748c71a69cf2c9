"""The weights with which vLLM samples after an update from ms-swift's trainer.

``--out FOLDER``, with a release of ms-swift on sys.path. The mixin's ``_move_model_to_vllm`` and its callees, PEFT,
transformers' Qwen2, and the buckets that transfer weights are real. vLLM's engine and the client of a server, which
store what they receive, and the trainer's set-up, which would load a model, are ours. The reference is W + s B A in
float64.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
from types import SimpleNamespace
from typing import Any

import torch

from rlhf_patches.proving import states

NAME = "swift-lora-counted-twice"
RANK, ALPHA, LAYERS = 4, 8, 2


def module(name: str) -> Any:
    """A module of the trainers, which 4.0 has moved."""
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.import_module(f"swift.rlhf_trainers.{name}")
    return importlib.import_module(f"swift.trainers.rlhf_trainer.{name}")


class Sampler:
    """vLLM: weights by name, and one adapter, which it adds to them; engine, model and client in one."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.adapter: dict[str, torch.Tensor] = {}
        self.full = self.adapters = 0
        self.engine = self.inner_model = self
        self.bucket = module("utils").FlattenedTensorBucket

    def modules(self) -> list[Any]:
        return []

    def reset_prefix_cache(self) -> None:
        pass

    def load_weights(self, weights: Any) -> None:
        self.full += 1
        self.weights.update({name.replace(".base_layer", ""): weight.clone() for name, weight in weights})

    def load_adapter(self, tensors: dict[str, torch.Tensor]) -> None:
        self.adapters += 1
        self.adapter = {name.removeprefix("base_model.model."): tensor.clone() for name, tensor in tensors.items()}

    def add_lora(self, request: Any) -> None:
        self.load_adapter(request.lora_tensors)

    def update_flattened_params(self, metadatas: Any, tensor: torch.Tensor) -> None:
        self.load_weights(self.bucket(metadata=metadatas, flattened_tensor=tensor).reconstruct_tensors().items())

    def update_adapter_flattened_param(self, config: Any, metadatas: Any, tensor: torch.Tensor) -> None:
        self.load_adapter(self.bucket(metadata=metadatas, flattened_tensor=tensor).reconstruct_tensors())

    def samples_with(self, name: str) -> torch.Tensor:
        weight = self.weights[f"{name}.weight"].double()
        if self.adapter:
            down, up = (self.adapter[f"{name}.lora_{part}.weight"].double() for part in "AB")
            weight = weight + ALPHA / RANK * up @ down
        return weight


def make_model(new: bool) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(3)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": LAYERS}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=2))
    model.model_meta = SimpleNamespace(model_arch=None)
    policy = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["q_proj", "down_proj"]))
    if not new:
        learn(policy)
    return policy


def learn(policy: Any) -> None:
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if ".lora_B." in name:
                parameter.add_(torch.randn_like(parameter) / 2)


def make_trainer(mode: str, new: bool, lora: bool, level: int, batches: int | None, resumed: bool) -> Any:
    trainer: Any = object.__new__(module("rollout_mixin").RolloutTrainerMixin)
    trainer.model = make_model(new)
    trainer.accelerator = SimpleNamespace(
        is_main_process=True, unwrap_model=lambda model: model, state=SimpleNamespace(deepspeed_plugin=None)
    )
    kind = {"train_type": "lora", "tuner_type": "lora"}
    trainer.args = SimpleNamespace(
        **kind,
        async_generate=False,
        sleep_level=level,
        move_model_batches=batches,
        resume_from_checkpoint="a checkpoint" if resumed else None,
        report_to=[],
    )
    trainer.vllm_mode, trainer.rollout_enable_lora, trainer._is_fsdp2 = mode, lora, False
    trainer.is_fsdp_enabled = trainer.base_sync_done = trainer.is_multimodal = False
    trainer.parameter_groups, trainer.parameter_groups_no_lora = trainer.split_batches()
    trainer.engine = trainer.vllm_client = Sampler()
    return trainer


def off(trainer: Any) -> float:
    """The distance of the sampling weights from the policy's, relative to the adapter's contribution."""
    wrong = added = 0.0
    for name, layer in trainer.model.base_model.model.named_modules():
        if hasattr(layer, "lora_A"):
            delta = ALPHA / RANK * layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
            policy = layer.base_layer.weight.double() + delta
            wrong += (trainer.engine.samples_with(name) - policy).square().sum().item()
            added += delta.square().sum().item()
    return float((wrong / (added or 1.0)) ** 0.5)


def updates(
    mode: str = "colocate",
    *,
    new: bool = False,
    lora: bool = True,
    level: int = 0,
    batches: int | None = None,
    resumed: bool = True,
) -> dict[str, Any]:
    """Three updates, each followed by a training step; and whether the policy is unchanged."""
    trainer = make_trainer(mode, new, lora, level, batches, resumed)
    found: dict[str, Any] = {"off": [], "sent": []}
    kept = True
    for _ in range(3):
        before = copy.deepcopy(trainer.model.state_dict())
        with torch.no_grad():
            trainer._move_model_to_vllm()
        after = trainer.model.state_dict()
        kept = kept and all(torch.allclose(before[name], after[name], rtol=0, atol=1e-6) for name in before)
        found["off"].append(off(trainer))
        found["sent"].append([trainer.engine.full, trainer.engine.adapters])
        learn(trainer.model)
    return {**found, "kept": kept}


def observe() -> dict[str, Any]:
    return {
        "colocate": updates(),
        "server": updates("server"),
        "in batches": updates(batches=2),
        "an adapter given": updates(resumed=False),
        "a new adapter": updates(new=True, resumed=False),
        "without": updates(lora=False),
        "level 2": updates(level=2),
        "level 2, a new adapter": updates(level=2, new=True, resumed=False),
    }


def main() -> None:
    options = states.parser().parse_args()
    module("rollout_mixin")
    states.report(NAME, observe, options.out)
