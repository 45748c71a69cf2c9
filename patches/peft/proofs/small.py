"""A small model for LoRA adapters, and the same policy computed from the definition in float64, without PEFT."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

WIDTH, RANK, ALPHA = 16, 4, 8


class Small(nn.Module):
    """Two linear layers with an activation in between, and a head, in float32, the same every time."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.activation = nn.Tanh()
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)
        fill(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.activation(self.up(x))))


def fill(module: nn.Module, seed: int = 7) -> None:
    """Random values for every parameter, including adapters', by the order of their names."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(module.named_parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


def batch() -> torch.Tensor:
    """Inputs, 8 by WIDTH."""
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(11))


def loss(model: Any) -> torch.Tensor:
    """A number that depends on every parameter."""
    return model(batch()).square().mean()


def gradients_in_float64(model: Any, adapter: str, *others: str) -> dict[str, torch.Tensor]:
    """The gradients of that loss, with LoRA adapters on ``up`` and ``down``, by name: the first adapter's."""
    values = {name: tensor.detach().double() for name, tensor in model.named_parameters()}
    trained = {name: tensor.requires_grad_() for name, tensor in values.items() if f".{adapter}." in name}

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        place = f"base_model.model.{name}"
        outputs = x @ values[f"{place}.base_layer.weight"].T + values[f"{place}.base_layer.bias"]
        for each in (adapter, *others):
            a, b = (values[f"{place}.lora_{part}.{each}.weight"] for part in "AB")
            outputs = outputs + ALPHA / RANK * (x @ a.T @ b.T)
        return outputs

    places = (f"modules_to_save.{adapter}.", "base_layer.", "")  # its own; within another adapter's layer; bare
    head = next(name for name in (f"base_model.model.head.{place}" for place in places) if f"{name}weight" in values)
    hidden = linear("down", torch.tanh(linear("up", batch().double())))
    outputs = hidden @ values[f"{head}weight"].T + values[f"{head}bias"]
    outputs.square().mean().backward()
    return {name: tensor.grad for name, tensor in trained.items() if tensor.grad is not None}


def flags(model: nn.Module) -> dict[str, bool]:
    """The trainable parameters."""
    return {name: parameter.requires_grad for name, parameter in model.named_parameters()}
