"""What TRL's disable_dropout_in_model does to modules of a user and of others: ``--out FOLDER``.

Before apply() of trl-functional-dropout, and after it.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import transformers
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from transformers.models.llama.modeling_llama import LlamaAttention
from trl.trainer import utils

from rlhf_patches.patches.trl._functional_dropout import is_left_on
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
    "Falcon": lambda: FORWARDS["Falcon"](),
    "own module": lambda: torch.nn.Sequential(Own(), torch.nn.MultiheadAttention(4, 2, dropout=0.1)),
}


TINY: dict[str, Any] = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
OF_BART: dict[str, Any] = {"vocab_size": 50, "d_model": 16, "max_position_embeddings": 64}
RATES: dict[str, Any] = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
FORWARDS: dict[str, Any] = {
    "BioGPT": lambda: transformers.BioGptForCausalLM(
        transformers.BioGptConfig(**TINY, intermediate_size=32, max_position_embeddings=64)
    ),
    "XGLM": lambda: transformers.XGLMForCausalLM(
        transformers.XGLMConfig(**OF_BART, ffn_dim=32, num_layers=2, attention_heads=2)
    ),
    "BART": lambda: transformers.BartForConditionalGeneration(
        transformers.BartConfig(**OF_BART, encoder_attention_heads=2, decoder_attention_heads=2)
    ),
    "Bloom": lambda: transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=50, hidden_size=16, n_layer=2, n_head=2, **RATES)
    ),
    "Starcoder 2": lambda: transformers.Starcoder2ForCausalLM(
        transformers.Starcoder2Config(
            **TINY, intermediate_size=32, num_key_value_heads=2, residual_dropout=0.1, embedding_dropout=0.1
        )
    ),
    "GPTBigCode": lambda: transformers.GPTBigCodeForCausalLM(
        transformers.GPTBigCodeConfig(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=64)
    ),
    "Falcon": lambda: transformers.FalconForCausalLM(transformers.FalconConfig(**TINY, **RATES)),
    "Persimmon": lambda: transformers.PersimmonForCausalLM(
        transformers.PersimmonConfig(**TINY, intermediate_size=32, **RATES)
    ),
}


def repeats(make: Any) -> bool:
    """Whether two forwards of a model in training are equal."""
    torch.manual_seed(0)
    model = make()
    utils.disable_dropout_in_model(model)
    model.train()
    tokens = torch.randint(3, 50, (2, 12))
    return torch.equal(model(input_ids=tokens).logits, model(input_ids=tokens).logits)


def observe() -> dict[str, Any]:
    found: dict[str, Any] = {"repeats": {name: repeats(make) for name, make in FORWARDS.items()}}
    found["met"] = {name: is_left_on(make()) for name, make in FORWARDS.items()}
    for name, make in MODELS.items():
        model = make()
        utils.disable_dropout_in_model(model)
        modules = [vars(module) for module in model.modules()]
        names = ("dropout", "attention_dropout", "hidden_dropout", "p")
        found[name] = [str(each[key]) for each in modules for key in names if key in each]
    return found


def main() -> None:
    states.report(NAME, observe, states.parser().parse_args().out)
