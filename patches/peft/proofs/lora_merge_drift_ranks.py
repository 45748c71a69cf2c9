"""LoRA adapters merged into a small model and unmerged: ``--out DIR``, with a release of PEFT on sys.path.

``rank0.json`` has the observations before apply() of peft-lora-merge-drift, after it, and after revert().
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.tensor import DTensor

import rlhf_patches
from rlhf_patches.patches.peft.proofs import small
from rlhf_patches.proving import states

NAME = "peft-lora-merge-drift"
CYCLES = 100
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def policy(dtype: torch.dtype = torch.bfloat16, **more: Any) -> PeftModel:
    """An adapter on both linear layers, of the size of a trained one."""
    config = LoraConfig(r=small.RANK, lora_alpha=small.ALPHA, target_modules=["up", "down"], **more)
    model = get_peft_model(small.Small().to(DEVICE, dtype), config)
    train(model, 0)
    return model


def train(model: PeftModel, step: int) -> None:
    """Replaces an optimizer step: another adapter each time, with products of a tenth of the weights' size."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def linears(model: PeftModel) -> dict[str, Any]:
    return {name: getattr(model.base_model.model, name) for name in ("up", "down")}


def _base_weights(model: PeftModel) -> dict[str, torch.Tensor]:
    return {name: layer.get_base_layer().weight.detach().clone() for name, layer in linears(model).items()}


def merge(model: PeftModel, **options: Any) -> None:
    """Like `merge_adapter`, which passes these options on in later releases."""
    for layer in linears(model).values():
        layer.merge(**options)


def digest(model: PeftModel) -> str:
    """A digest of every parameter's bits."""
    found = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        found.update(name.encode() + tensor.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()


@contextlib.contextmanager
def trial(model: PeftModel) -> Any:
    """The change of the base weights within the block, and the way in which layers are unmerged."""
    before, counted = _base_weights(model), observed()
    found: dict[str, Any] = {}
    yield found
    after = _base_weights(model)
    plain = {name: (before[name].double(), after[name].double()) for name in before}
    moved = [float((new - old).abs().mean() / old.abs().mean()) for old, new in plain.values()]
    found["moved"] = max(moved)
    found["same"] = all(torch.equal(before[name], after[name]) for name in before)
    found["digest"] = digest(model)
    found["ways"] = {way: number - counted[way] for way, number in observed().items()}


def observed() -> dict[str, int]:
    from rlhf_patches.patches.peft import _base_weights

    return _base_weights.observed()


def many_cycles(dtype: torch.dtype, **options: Any) -> dict[str, Any]:
    """A weight synchronization after each step; merged weights compared with the sum in float64."""
    model, errors = policy(dtype), []
    original = _base_weights(model)
    with trial(model) as found:
        for step in range(CYCLES):
            train(model, step)
            merge(model, **options)
            if not step:
                merged = digest(model)
                for name, layer in linears(model).items():
                    a, b = (getattr(layer, part)["default"].weight.double() for part in ("lora_A", "lora_B"))
                    weight, product = original[name].double(), small.ALPHA / small.RANK * (b @ a)
                    error = (layer.get_base_layer().weight.double() - weight - product).abs()
                    errors.append(float((error / (weight.abs() + product.abs())).max()))
            model.unmerge_adapter()
    found.update({"merged, off float64 by": max(errors), "merged": merged})
    return found


def observe() -> dict[str, Any]:
    return {"bfloat16": many_cycles(torch.bfloat16)}


def main(observe: Callable[[], dict[str, Any]] = observe) -> None:
    options = states.parser().parse_args()
    torch.distributed.init_process_group("gloo")
    found: dict[str, Any] = {"version": importlib.metadata.version("peft"), "before": observe()}
    found["status"] = rlhf_patches.apply(only=NAME)[NAME].status.value
    found["after"] = observe()
    found["report"] = rlhf_patches.report()[NAME].observations
    rlhf_patches.revert()
    found["reverted"] = observe()
    (options.out / "rank0.json").write_text(json.dumps(found, indent=1, default=dict))
