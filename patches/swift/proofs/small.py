"""A small model for ms-swift's trainers without Megatron, and a trainer around it that has not been set up."""

from __future__ import annotations

import importlib
from typing import Any

import torch

VOCABULARY, LAYERS, HIDDEN = 64, 1, 32
DROPOUT = 0.1


class Transformers:
    """A trainer without Megatron, given as ``module:class``, and a Qwen2 model."""

    def __init__(self, trainer: str) -> None:
        module, _, name = trainer.partition(":")
        self.trainer_class = getattr(importlib.import_module(module), name)
        self.targets = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]

    def make_model(self) -> Any:
        from transformers import Qwen2Config, Qwen2ForCausalLM

        config = Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=4,
            attention_dropout=DROPOUT,
        )
        return Qwen2ForCausalLM(config)

    def logits(self, model: Any, inputs: torch.Tensor) -> torch.Tensor:
        return model(input_ids=inputs).logits

    def trainer(self, peft_models: list[Any], ref_adapter: bool) -> Any:
        from accelerate import Accelerator

        trainer = object.__new__(self.trainer_class)
        trainer.accelerator = Accelerator(cpu=True)
        (trainer.model,) = peft_models
        trainer.is_peft_model = True
        trainer.ref_adapter_name = "ref_adapter" if ref_adapter else None
        trainer.model_adapter_name = None
        return trainer
