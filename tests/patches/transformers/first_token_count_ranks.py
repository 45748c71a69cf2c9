"""One step of models whose labels begin with a token that counts, by the real ``Trainer``: ``--out FOLDER [CASE ...]``.

As the proof of transformers-first-token-count: more models, losses and classes of one's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers.loss.loss_utils import ForCausalLMLoss

from rlhf_patches.patches.transformers.proofs import first_token_count_ranks
from rlhf_patches.patches.transformers.proofs.first_token_count_ranks import ROWS, VOCABULARY, gpt2, step
from rlhf_patches.patches.transformers.proofs.moe_aux_loss_ranks import dense
from tests.patches.transformers.eval_loss_ranks import classifier, t5

SIZES = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2, "max_position_embeddings": 16}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Inherits(transformers.GPT2LMHeadModel):
    """A class of one's own, with GPT-2's forward."""


class Own(transformers.GPT2LMHeadModel):
    """And one with another, of which nothing is known."""

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return super().forward(*arguments, **named)


def with_lora() -> Any:
    return get_peft_model(gpt2(), LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False))


def bert() -> Any:
    return transformers.BertLMHeadModel(transformers.BertConfig(**SIZES, **NO_DROPOUT, is_decoder=True))


def ctrl() -> Any:
    sizes = {"n_embd": 16, "dff": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    return transformers.CTRLLMHeadModel(
        transformers.CTRLConfig(vocab_size=VOCABULARY, **sizes, resid_pdrop=0.0, embd_pdrop=0.0)
    )


def masked() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **NO_DROPOUT))


def doubled(logits: Any, labels: Any, **more: Any) -> Any:
    """A loss of one's own."""
    return 2 * ForCausalLMLoss(logits, labels, **more)


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    **first_token_count_ranks.CASES,
    "GPT-2, one by one": lambda: step(gpt2, per_device_train_batch_size=1, gradient_accumulation_steps=ROWS),
    "LoRA": lambda: step(with_lora),
    "compiled before": lambda: step(gpt2, wrap=lambda model: torch.compile(model, backend="eager")),
    "BERT": lambda: step(bert),
    "CTRL": lambda: step(ctrl),
    "inherits": lambda: step(lambda: gpt2(Inherits)),
    "not the first": lambda: step(gpt2, kind="not the first"),
    "Qwen3": lambda: step(dense),
    "masked": lambda: step(masked, causal=False),
    "classifier": lambda: step(classifier, kind="classes", causal=False),
    "T5": lambda: step(t5, kind="seq2seq", causal=False),
    "own forward": lambda: step(lambda: gpt2(Own), causal=False),
    "own loss": lambda: step(lambda: gpt2(loss_function=doubled), causal=False),
    "own type": lambda: step(lambda: gpt2(loss_type="ForMaskedLM"), causal=False),
    "trainer's own": lambda: step(gpt2, shifts=False),
}


def main() -> None:
    first_token_count_ranks.main(CASES)
