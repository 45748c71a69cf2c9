"""Layers of each kind with DoRA adapters, and the weights that merging gives, from DoRA's definition in float64."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from rlhf_patches.patches.peft.proofs import small

RANK, ALPHA, WIDTH = 4, 8, 16
LAYERS = {
    "linear": lambda: nn.Linear(WIDTH, 2 * WIDTH),
    "Conv1D": lambda: Conv1D(WIDTH, WIDTH),
    "Conv1D, not square": lambda: Conv1D(2 * WIDTH, WIDTH),
    "embedding": lambda: nn.Embedding(WIDTH, 2 * WIDTH),
    "convolution": lambda: nn.Conv2d(WIDTH, 2 * WIDTH, 3, padding=1),
}


def layer_of(kind: str, *adapters: bool, dtype: torch.dtype = torch.float32, **more: Any) -> tuple[Any, Any]:
    """A model of one layer, and the layer, with an adapter ``a``, ``b``, ... for each: whether it is DoRA."""
    model: Any = None
    torch.manual_seed(len(adapters))
    for name, dora in zip("abc", adapters, strict=False):
        more.update(fan_in_fan_out=kind.startswith("Conv1D"))
        config = LoraConfig(target_modules=["layer"], r=RANK, lora_alpha=ALPHA, use_dora=dora, **more)
        if model is None:
            base = nn.ModuleDict({"layer": LAYERS[kind]()})
            small.fill(base)
            model = get_peft_model(base.to(dtype), config, adapter_name=name)
        else:
            model.add_adapter(name, config)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "lora_" in name:
                parameter.add_(torch.randn(parameter.shape) * 0.2)
    model.base_model.set_adapter(list("abc"[: len(adapters)]))
    return model.eval(), model.base_model.model.layer


def weight_of(layer: Any) -> torch.Tensor:
    """A copy of the base weight."""
    return getattr(layer, "base_layer", layer).weight.detach().clone()


def digest(layer: Any) -> str:
    """A digest of the base weight's bits."""
    return hashlib.sha256(weight_of(layer).view(torch.uint8).numpy().tobytes()).hexdigest()


def outputs(model: Any, kind: str) -> torch.Tensor:
    """The layer's outputs for inputs of its kind, in float32."""
    generator = torch.Generator().manual_seed(5)
    layer = getattr(getattr(model, "base_model", model), "model", model)["layer"]
    dtype = getattr(layer, "base_layer", layer).weight.dtype
    if kind == "embedding":
        inputs = torch.arange(WIDTH)
    else:
        shape = (2, WIDTH, 5, 5) if kind == "convolution" else (8, WIDTH)
        inputs = torch.randn(shape, generator=generator).to(dtype)
    with torch.no_grad():
        return layer(inputs).float()


def merged_in_float64(layer: Any, kind: str, order: str) -> torch.Tensor:
    """The weight with the adapters in this order; the norm is that of the base weight and the adapter's product."""
    base = weight_of(layer).double()
    axes = {"linear": (1,), "convolution": (1, 2, 3)}.get(kind, (0,))  # all but the outputs
    weight = base
    for name in order:
        product = _product(layer, kind, name).reshape(base.shape)
        weight = weight + product
        if name in layer.lora_magnitude_vector:
            norm = (base + product).square().sum(axes, keepdim=True).sqrt()
            weight = layer.lora_magnitude_vector[name].weight.detach().double().reshape(norm.shape) / norm * weight
    return weight


def _product(layer: Any, kind: str, name: str) -> torch.Tensor:
    if kind == "embedding":
        a, b = (each[name].detach().double() for each in (layer.lora_embedding_A, layer.lora_embedding_B))
    else:
        a, b = (each[name].weight.detach().double() for each in (layer.lora_A, layer.lora_B))
    product = ALPHA / RANK * torch.einsum("or,ri->oi", b.reshape(b.shape[0], -1), a.reshape(RANK, -1))
    return product if kind in ("linear", "convolution") else product.T


def off(found: torch.Tensor, right: torch.Tensor) -> float:
    """The relative error."""
    return float((found.double() - right.double()).norm() / right.double().norm())
