"""What TRL's disable_dropout_in_model does to modules of a user and of others: ``--out FOLDER``.

Before apply() of trl-functional-dropout, and after it.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from transformers.models.llama.modeling_llama import LlamaAttention
from trl.trainer import utils

from rlhf_patches.patches.trl.proofs.functional_dropout_ranks import NAME, llama
from rlhf_patches.proving import states


class Attention(LlamaAttention):
    """A user's, with its own forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Named(LlamaAttention):
    """A user's, with the released forward."""


class Own(torch.nn.Module):
    """A user's, in which the number may be anything."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = 0.1
        self.inner = torch.nn.Dropout(0.1)


def with_attention(change: Any) -> Any:
    torch.manual_seed(0)
    model = llama(attention_dropout=0.1)
    for layer in model.model.layers:
        change(layer)
    return model


def of_class(kind: type) -> Any:
    def change(layer: Any) -> None:
        layer.self_attn = kind(layer.self_attn.config, 0)

    return change


def assigned(layer: Any) -> None:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return LlamaAttention.forward(self, *args, **kwargs)

    layer.self_attn.forward = types.MethodType(forward, layer.self_attn)


def hooked(layer: Any) -> None:
    """As accelerate places a module on a device."""
    add_hook_to_module(layer.self_attn, AlignDevicesHook(execution_device="cpu"))


def assigned_and_hooked(layer: Any) -> None:
    assigned(layer)
    hooked(layer)


def with_a_number(value: Any) -> Any:
    def change(layer: Any) -> None:
        layer.self_attn.attention_dropout = value

    return change


MODELS: dict[str, Any] = {
    "released": lambda: with_attention(lambda layer: None),
    "own forward": lambda: with_attention(of_class(Attention)),
    "own class": lambda: with_attention(of_class(Named)),
    "assigned forward": lambda: with_attention(assigned),
    "on several devices": lambda: with_attention(hooked),
    "assigned, on several devices": lambda: with_attention(assigned_and_hooked),
    "no number": lambda: with_attention(with_a_number(None)),
    "a tensor": lambda: with_attention(with_a_number(torch.tensor(0.1))),
    "own module": lambda: torch.nn.Sequential(Own(), torch.nn.MultiheadAttention(4, 2, dropout=0.1)),
}


def observe() -> dict[str, Any]:
    found = {}
    for name, make in MODELS.items():
        model = make()
        utils.disable_dropout_in_model(model)
        modules = [vars(module) for module in model.modules()]
        names = ("dropout", "attention_dropout", "p")
        found[name] = [str(each[key]) for each in modules for key in names if key in each]
    return found


def main() -> None:
    states.report(NAME, observe, states.parser().parse_args().out)
