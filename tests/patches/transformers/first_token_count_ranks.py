"""One step of models whose labels begin with a token that counts, by the real ``Trainer``: ``--out FOLDER [CASE ...]``.

As the proof of transformers-first-token-count: more models, losses and classes of one's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import Trainer
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


class OwnLoss(transformers.GPT2LMHeadModel):
    def loss_function(self, logits: Any, labels: Any, **more: Any) -> Any:
        return unshifted(logits, labels, **more)


class OwnProperty(transformers.GPT2LMHeadModel):
    @property
    def loss_function(self) -> Any:
        return unshifted


class Computes(Trainer):
    """The first label counts."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = unshifted(outputs.logits, labels, num_items_in_batch=num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


class CountsRight(Trainer):
    """A way round the bug: without the first label of each row."""

    def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> Any:
        return super()._get_num_items_in_batch(batch_samples, device) - sum(
            len(batch["labels"]) for batch in batch_samples
        )


class StepsRight(Trainer):
    """Another one."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        return super().training_step(model, inputs, num_items_in_batch - ROWS)


def with_prompt() -> Any:
    """Whose first label is predicted, from the last of the virtual tokens."""
    return get_peft_model(gpt2(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


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


def unshifted(logits: Any, labels: Any, num_items_in_batch: Any = None, **_: Any) -> Any:
    """Of labels that are those of the next token already."""
    summed = cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
    return summed / (num_items_in_batch if num_items_in_batch is not None else labels.ne(-100).sum())


def of_outputs(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return unshifted(outputs["logits"], labels, num_items_in_batch)


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
    "class's own loss": lambda: step(lambda: gpt2(OwnLoss), causal=False),
    "class's own property": lambda: step(lambda: gpt2(OwnProperty), causal=False),
    "own loss, later": lambda: step(
        gpt2, causal=False, change=lambda trainer: setattr(trainer.model, "loss_function", unshifted)
    ),
    "compute_loss_func": lambda: step(gpt2, causal=False, own_loss=of_outputs),
    "compute_loss_func, later": lambda: step(
        gpt2, causal=False, change=lambda trainer: setattr(trainer, "compute_loss_func", of_outputs)
    ),
    "own compute_loss": lambda: step(gpt2, causal=False, of=Computes),
    "smoothing": lambda: step(lambda: gpt2(Inherits), causal=False, label_smoothing_factor=0.1),
    "prompt tuning": lambda: step(with_prompt, causal=False),
    "own count": lambda: step(gpt2, of=CountsRight),
    "own step": lambda: step(gpt2, of=StepsRight),
    "trainer's own": lambda: step(gpt2, change=lambda trainer: setattr(trainer, "_loss_shifts_labels", False)),
}


def main() -> None:
    torch.compiler.set_stance("force_eager")  # what counts is the wrapper; tracing the model takes seconds
    first_token_count_ranks.main(CASES)
