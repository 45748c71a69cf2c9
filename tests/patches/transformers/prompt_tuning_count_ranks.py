"""One step of models behind virtual tokens, and of others, by the real ``Trainer``: ``--out FOLDER [CASE ...]``.

As the proof of transformers-prompt-tuning-count: other adapters, TRL's SFT, and code of one's own.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import Trainer

from rlhf_patches.patches.transformers.proofs import prompt_tuning_count_ranks
from rlhf_patches.patches.transformers.proofs.eval_loss_ranks import Collator
from rlhf_patches.patches.transformers.proofs.first_token_count_ranks import ROWS, Keep, data, gpt2
from rlhf_patches.patches.transformers.proofs.prompt_tuning_count_ranks import by_definition, compared, step, tuned
from rlhf_patches.patches.trl.proofs import small
from rlhf_patches.proving import states


class Own(peft.PeftModelForCausalLM):
    """A user's."""


class CountsRight(Trainer):
    """A way round the bug: with the first label of each row."""

    def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> Any:
        return super()._get_num_items_in_batch(batch_samples, device) + sum(
            len(batch["labels"]) for batch in batch_samples
        )


class Computes(Trainer):
    """And another one."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch + ROWS)


def of_outputs(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """A loss of one's own."""
    logits = outputs["logits"][:, -labels.shape[1] - 1 : -1]
    summed = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return summed / num_items_in_batch


def with_a_hook(trainer: Any) -> None:
    next(each for each in trainer.model.parameters() if each.requires_grad).register_hook(lambda gradient: gradient)


def with_a_forward_hook(trainer: Any) -> None:
    trainer.model.register_forward_pre_hook(lambda module, args: None)


def evaluated(make: Callable[[], Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    found |= step(make, change=lambda trainer: found.update(evaluated=trainer.evaluate()["eval_loss"]))
    return found


def over_lora() -> Any:
    """PEFT's model within PEFT's model."""
    return tuned(
        make=lambda: peft.get_peft_model(prompt_tuning_count_ranks.llama(), peft.LoraConfig(r=2, task_type="CAUSAL_LM"))
    )


def disabled(make: Callable[[], Any]) -> dict[str, Any]:
    """The base model's loss, in PEFT's context, and after it the prompt's."""
    found: dict[str, Any] = {}

    def change(trainer: Any) -> None:
        model = trainer.model
        batch = Collator()(data("tokens"))
        labels = batch.pop("labels")
        logits = copy.deepcopy(model.base_model).double()(**batch).logits[:, :-1]
        right = float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()))
        with model.disable_adapter():
            found["times of the base model"] = trainer.evaluate()["eval_loss"] / right

    return {**step(make, change=change), **found}


def sft() -> dict[str, Any]:
    """TRL's trainer with its default loss."""
    import trl
    from datasets import Dataset

    rows = data("tokens")
    plain = [{"input_ids": [token + 3 for token in row["input_ids"][:5].tolist()]} for row in rows]
    torch.manual_seed(0)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(small.model(), config)
    ids = torch.tensor([row["input_ids"] for row in plain])
    wanted = by_definition(model, [{"input_ids": each, "labels": each, "id": 0} for each in ids])
    trainer = trl.SFTTrainer(
        model,
        trl.SFTConfig(
            **{**small.STEPS, "output_dir": str(Path(states.folder()) / "trainer"), "max_steps": 1},
            per_device_train_batch_size=ROWS,
        ),
        train_dataset=Dataset.from_list(plain),
        processing_class=small.tokenizer(),
    )
    trainer.add_callback(keep := Keep())
    loss = trainer.train().training_loss
    return {"loss": loss, **compared(keep.found, wanted)}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    **prompt_tuning_count_ranks.CASES,
    "p-tuning": lambda: step(lambda: tuned("PromptEncoder")),
    "one by one": lambda: step(tuned, per_device_train_batch_size=1, gradient_accumulation_steps=ROWS),
    "evaluated": lambda: evaluated(tuned),
    "SFT": sft,
    "after disable_adapter": lambda: disabled(tuned),
    "after disable_adapter, over LoRA": lambda: disabled(over_lora),
    "bf16": lambda: step(tuned, bf16=True),
    "not the first": lambda: step(tuned, kind="not the first"),
    "LoRA": lambda: step(lambda: tuned("Lora")),
    "prefix tuning": lambda: step(lambda: tuned("PrefixTuning")),
    "without PEFT": lambda: step(prompt_tuning_count_ranks.llama),
    "GPT-2": lambda: step(lambda: tuned(make=gpt2)),
    "own class": lambda: step(lambda: tuned(of=Own)),
    "own count": lambda: step(tuned, of=CountsRight),
    "own compute_loss": lambda: step(tuned, of=Computes),
    "compute_loss_func": lambda: step(tuned, own_loss=of_outputs),
    "a hook": lambda: step(tuned, change=with_a_hook),
    "a forward hook": lambda: step(tuned, change=with_a_forward_hook),
}


def main() -> None:
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    prompt_tuning_count_ranks.main(CASES)
