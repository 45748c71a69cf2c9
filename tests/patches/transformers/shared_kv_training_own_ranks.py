"""Gemma 3n without a cache: Trainer, torch.compile, wrappers, code of one's own: ``--out FOLDER [CASE ...]``."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from transformers.models.gemma3n import modeling_gemma3n

from rlhf_patches.patches.transformers.proofs import first_token_count_ranks, shared_kv_training_ranks
from rlhf_patches.patches.transformers.proofs.eval_loss_ranks import Collator
from rlhf_patches.patches.transformers.proofs.shared_kv_gradient_ranks import (
    VOCABULARY,
    bits,
    gradients,
    loss_of,
    off,
    tokens,
)
from rlhf_patches.patches.transformers.proofs.shared_kv_training_ranks import by_cache, compared, made
from rlhf_patches.proving import states
from rlhf_patches.testing import untouched

NAME = "Gemma3n"
# Before 5.10.1, Trainer counts the first token's label.
KIND = "not the first"


class OwnLayer(modeling_gemma3n.Gemma3nTextDecoderLayer):
    """A layer of one's own, which does not take what it does not know."""

    def forward(self, hidden_states: Any, *arguments: Any, **named: Any) -> Any:
        assert not [name for name in named if name.startswith("_")]
        return super().forward(hidden_states, *arguments, **named)


class OwnAttention(modeling_gemma3n.Gemma3nTextAttention):
    def forward(self, *arguments: Any, **named: Any) -> Any:
        assert named["past_key_values"] is None
        return super().forward(*arguments, **named)


class Inherits(modeling_gemma3n.Gemma3nTextDecoderLayer):
    """A class of one's own, with the release's forward."""


def with_class(kind: Any, part: str = "") -> Any:
    model = made(NAME)
    for layer in model.model.layers:
        (getattr(layer, part) if part else layer).__class__ = kind
    return model


def with_forward() -> Any:
    """Of one layer only."""
    model = made(NAME)
    layer = model.model.layers[1]
    layer.forward = types.MethodType(lambda self, *a, **k: type(self).forward(self, *a, **k), layer)
    return model


def step(model: Any, call: Callable[..., torch.Tensor] = loss_of, **given: Any) -> dict[str, Any]:
    """Compared with the cache, what a forward changes in the model, and what is logged."""
    touched = ""
    with states.heard() as heard:
        try:
            with untouched(model):
                call(model, **given)
        except AssertionError as error:
            touched = str(error)
        loss = call(model, **given)
        loss.backward()
    return {**compared(NAME, model, loss), "touched": touched, "heard": [each for each in heard if "stays" in each]}


def with_cache() -> dict[str, Any]:
    return step(made(NAME).eval(), use_cache=True)


def generated() -> dict[str, Any]:
    model, options = made(NAME).eval(), {"max_new_tokens": 5, "do_sample": False}
    return {"ids": model.generate(tokens(), use_cache=True, **options).tolist()}


def other(model: Any) -> dict[str, Any]:
    (loss := loss_of(model)).backward()
    return {"bits": bits(model, loss)}


def qwen3() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    config = transformers.Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    return transformers.Qwen3ForCausalLM(config).train()


def wrapped() -> dict[str, Any]:
    """As accelerate checkpoints with FSDP."""
    model = made(NAME)
    layer = modeling_gemma3n.Gemma3nTextDecoderLayer
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, layer))
    (loss := loss_of(model)).backward()
    wanted = by_cache(NAME)[1]
    plain = {name.replace("_checkpoint_wrapped_module.", ""): each for name, each in gradients(model).items()}
    off_by = off({name: each for name, each in plain.items() if name in wanted}, wanted)
    return {"gradient": off_by, "parameters": len(wanted), "bits": bits(model, loss)}


def with_a_cache(model: Any) -> tuple[torch.Tensor, Any]:
    cache = transformers.DynamicCache(config=model.config)
    return loss_of(model, past_key_values=cache), cache


def cached_in_training() -> dict[str, Any]:
    loss, cache = with_a_cache(model := made(NAME))
    loss.backward()
    return {**compared(NAME, model, loss), "cached": cache.get_seq_length()}


def cached_and_checkpointed() -> dict[str, Any]:
    """A cache that checkpointing takes from the layers."""
    model = made(NAME)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    loss, _ = with_a_cache(model)
    loss.backward()
    return compared(NAME, model, loss)


def by_trainer() -> dict[str, Any]:
    """The first loss, compared with the cache's."""
    more = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    found = first_token_count_ranks.step(lambda: made(NAME), kind=KIND, causal=False, **more)
    batch = Collator()(first_token_count_ranks.data(KIND))
    model = first_token_count_ranks.made(lambda: made(NAME)).double().eval()
    return {"loss": abs(model(**batch, use_cache=True).loss.item() - found["loss"])}


def compiled(**options: Any) -> dict[str, Any]:
    torch._dynamo.reset()
    model = made(NAME)
    loss = loss_of(torch.compile(model, backend="aot_eager", **options))
    loss.backward()
    return compared(NAME, model, loss)


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    **shared_kv_training_ranks.cases(),
    "training": lambda: step(made(NAME)),
    "evaluation": lambda: step(made(NAME).eval()),
    "use_cache": lambda: step(made(NAME), use_cache=True),
    "inherits": lambda: step(with_class(Inherits)),
    "wrapped": wrapped,
    "cache and checkpointing": cached_and_checkpointed,
    "Trainer": by_trainer,
    "compiled": functools.partial(compiled, fullgraph=True),
    "cache": with_cache,
    "cache in training": cached_in_training,
    "generated": generated,
    "own layer": lambda: step(with_class(OwnLayer)),
    "own attention": lambda: step(with_class(OwnAttention, "self_attn")),
    "own forward": lambda: step(with_forward()),
    "no sharing": lambda: other(made(NAME, num_kv_shared_layers=0)),
    "Qwen3": lambda: other(qwen3()),
}


def main() -> None:
    shared_kv_training_ranks.main(CASES)
