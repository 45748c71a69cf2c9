"""LoRA in transformers' own Trainer over DeepSpeed, which keeps its scheduler to itself: ``--out FOLDER``, on one rank.

Before apply() of deepspeed-empty-groups, after it, and after revert().
"""

from __future__ import annotations

import tempfile
import traceback
from typing import Any

import torch
import transformers
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer

from rlhf_patches.patches.deepspeed.proofs.empty_groups_ranks import NAME
from rlhf_patches.proving import states
from tests.harness import zero3_on_cpu


class WithLoraPlus(transformers.Trainer):
    """As LLaMA-Factory and others have it."""

    optimizer: Any

    def create_optimizer(self) -> Any:
        if self.optimizer is None:
            self.optimizer = create_loraplus_optimizer(self.model, torch.optim.AdamW, lr=0.01, loraplus_lr_ratio=16.0)
        return self.optimizer


class Rates(transformers.TrainerCallback):
    """The rates of the groups when each step begins."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_step_begin(self, *_: Any, optimizer: Any, **__: Any) -> None:
        self.seen.append([group["lr"] for group in optimizer.param_groups])


def train(trainer: type[transformers.Trainer]) -> dict[str, Any]:
    """Three steps of a small model."""
    AcceleratorState._reset_state()  # there is one trainer in a process otherwise
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = get_peft_model(transformers.Qwen2ForCausalLM(config), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    tokens = torch.randint(32, (6, 4)).tolist()
    rates = Rates()
    with tempfile.TemporaryDirectory() as folder:
        made = trainer(
            model,
            transformers.TrainingArguments(
                folder,
                max_steps=3,
                per_device_train_batch_size=1,
                learning_rate=0.01,
                report_to=[],
                save_strategy="no",
                use_cpu=True,
                accelerator_config={"use_configured_state": True},
                deepspeed={
                    "train_micro_batch_size_per_gpu": 1,
                    "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000, "allgather_bucket_size": 1000},
                    "zero_allow_untested_optimizer": True,
                },
            ),
            train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
            callbacks=[rates],
        )
        found: dict[str, Any] = {"error": None}
        try:
            made.train()
        except ValueError as error:
            found.update(error=str(error), log=traceback.format_exc())
    return {**found, "rates": rates.seen}


def main() -> None:
    options = states.parser().parse_args()
    zero3_on_cpu.start()
    cases = {"LoRA": transformers.Trainer, "LoRA+": WithLoraPlus}
    states.report(NAME, lambda: {name: train(trainer) for name, trainer in cases.items()}, options.out)
