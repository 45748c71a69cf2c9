"""Gradients of transformers' mixtures of experts with the router's loss: ``--out FOLDER [CASE ...]``.

Each case before apply() of transformers-router-loss-reentrant, after it, and after revert(): the gradient of the loss
under gradient checkpointing, and that without checkpointing, in float64.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformers

from rlhf_patches.patches.transformers.proofs import shared_kv_gradient_ranks
from rlhf_patches.patches.transformers.proofs.shared_kv_gradient_ranks import REENTRANT, compared, gradients

NAME = "transformers-router-loss-reentrant"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY = 32
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
SIZES |= {"num_experts": 4, "num_local_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_k": 2}
SIZES |= {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "decoder_sparse_step": 1}
SIZES |= {"output_router_logits": True, "router_aux_loss_coef": 0.5, "use_cache": False, "pad_token_id": 0}
SIZES |= {"initializer_range": 0.3, "attn_implementation": "eager", "experts_implementation": "eager"}
SIZES |= {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
SIZES |= {"moe_layer_start_index": 0, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_dt_rank": 4}
SIZES |= {"use_mamba_kernels": False}
#: By the class of the model, that of its configuration.
FAMILIES = {name: name for name in ("Mixtral", "Qwen3Moe", "Qwen2Moe", "GptOss", "Olmoe", "FlexOlmo", "Phimoe")}
FAMILIES |= {name: name for name in ("GraniteMoe", "GraniteMoeShared", "GraniteMoeHybrid", "Qwen3Next", "MiniMax")}
FAMILIES |= {name: name for name in ("MiniMaxM2", "Ernie4_5_Moe", "Jamba", "Laguna", "Mellum")}
FAMILIES |= {"Qwen3_5Moe": "Qwen3_5MoeText"}

#: A router casts its input to float32, whatever the model has; one draws noise, other noise in float64.
FLOAT32 = ("ernie4_5_moe", "phimoe")


def has(family: str) -> bool:
    """Whether this release has it; 4.x cannot train GraniteMoeHybrid without Mamba layers."""
    is_there = hasattr(transformers, f"{FAMILIES[family]}Config") and hasattr(transformers, f"{family}ForCausalLM")
    return is_there and (family != "GraniteMoeHybrid" or not transformers.__version__.startswith("4."))


def fields_of(kind: Any) -> set[str]:
    """What a configuration takes by name, in either form that transformers has."""
    return {*inspect.signature(kind.__init__).parameters, *getattr(kind, "__dataclass_fields__", ())}


def made(family: str, **more: Any) -> Any:
    kind = getattr(transformers, f"{FAMILIES[family]}Config")
    known = fields_of(kind) | {"attn_implementation", "experts_implementation", *more}
    sizes = {**SIZES, **{name: list(each) if isinstance(each, tuple) else each for name, each in more.items()}}
    config = kind(**{name: value for name, value in sizes.items() if name in known})
    config.output_router_logits = sizes["output_router_logits"]
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config).train()


def tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, VOCABULARY, (2, 9), generator=generator, device="cpu").to(DEVICE)


def loss_of(model: Any, **given: Any) -> torch.Tensor:
    ids = tokens()
    loss: torch.Tensor = model(input_ids=ids, labels=ids, **given).loss
    return loss


def wanted_of(model: Any) -> dict[str, torch.Tensor]:
    """Without checkpointing, in float64 if the model can; without weights of experts that no token has."""
    loss_of(model if model.config.model_type in FLOAT32 else model.double()).backward()
    return {name: each for name, each in gradients(model).items() if each.norm() > 0}


@functools.cache
def by_definition(family: str, **more: Any) -> dict[str, torch.Tensor]:
    return wanted_of(made(family, **more))


def trained(
    family: str,
    checkpointing: dict[str, Any] | None = REENTRANT,
    call: Callable[[Any], torch.Tensor] = loss_of,
    **more: Any,
) -> dict[str, Any]:
    """The gradient under that checkpointing, compared with the definition."""
    model = made(family, **more)
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    return compared(model, by_definition(family, **more), call)


def cases() -> dict[str, Callable[[], Any]]:
    """The observations, by name; for the families that this release of transformers has."""
    return shared_kv_gradient_ranks.of_families(filter(has, FAMILIES), trained)


def main(known: dict[str, Callable[[], Any]] | None = None) -> None:
    shared_kv_gradient_ranks.main(known or cases(), NAME)
