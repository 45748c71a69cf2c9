"""One step of small mixtures of experts by ``Trainer``, on each of two ranks: ``--out FOLDER``.

As the proof of transformers-moe-aux-loss: more models, losses and arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    JetMoeConfig,
    JetMoeForCausalLM,
    Qwen3MoeForCausalLM,
)
from trl.trainer import sft_trainer

from rlhf_patches.patches.transformers.proofs import moe_aux_loss_ranks
from rlhf_patches.patches.transformers.proofs.moe_aux_loss_ranks import (
    COEFFICIENT,
    MIXTURE,
    SIZES,
    dense,
    one,
    qwen3_moe,
)


def jetmoe() -> Any:
    sizes = {**SIZES, "kv_channels": 8, "num_local_experts": 4}
    sizes.pop("num_attention_heads")
    return JetMoeForCausalLM(JetMoeConfig(**sizes, **MIXTURE, aux_loss_coef=COEFFICIENT))


def chunked() -> Any:
    """TRL's forward, whose coefficient is the configuration's: here another than the model was made with."""
    model = qwen3_moe()
    model.router_aux_loss_coef = 7.0
    sft_trainer._patch_chunked_ce_lm_head(model, chunk_size=4)
    return model


def lora() -> Any:
    return get_peft_model(qwen3_moe(), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))


def of_somebody() -> Any:
    """A forward of its own, which scales as it likes: nothing is known of it."""

    class Own(Qwen3MoeForCausalLM):
        def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **more: Any) -> Any:
            return super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **more)

    return Own(qwen3_moe().config)


def own_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    **moe_aux_loss_ranks.CASES,
    "JetMoE": lambda: one(jetmoe),
    "LoRA": lambda: one(lora),
    "chunked": lambda: one(chunked),
    "bfloat16": lambda: one(qwen3_moe, {"bf16": True}),
    "evaluation": lambda: one(qwen3_moe, evaluate=True),
    "dense": lambda: one(dense),
    "not averaged": lambda: one(qwen3_moe, {"average_tokens_across_devices": False}),
    "own loss": lambda: one(qwen3_moe, compute_loss_func=own_loss),
    "label smoothing": lambda: one(qwen3_moe, {"label_smoothing_factor": 0.1}),
    "own forward": lambda: one(of_somebody),
}


def main() -> None:
    moe_aux_loss_ranks.main(CASES)
