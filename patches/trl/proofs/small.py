"""A small model and tokenizer for TRL's trainers, on CPU ranks without DeepSpeed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

STEPS: dict[str, Any] = {
    "max_grad_norm": 0.0,
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "save_strategy": "no",
}
"""A trainer's configuration for tests that compare the gradients of steps: without clipping and saving."""
PROMPTS = ("w1 w2", "w3 w4 w5", "w6", "w7 w8 w9 w10")


def tokenizer() -> Any:
    """99 words, three of them special."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(96))]
    plain = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def model(tied: bool = False) -> Any:
    """One layer of Qwen 2 with the same weights every time."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=99,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    return Qwen2ForCausalLM(config)


def rollouts(
    kind: str,
    out: Path,
    rewards: Sequence[Callable[..., Any]],
    prompts: Sequence[str] = PROMPTS,
    policy: Any = None,
    more: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """A trainer that generates itself, two completions of four tokens for each prompt.

    Args:
        kind: ``GRPO`` or ``RLOO``.
        out: a folder that stays empty.
        rewards: the reward functions.
        prompts: the data set.
        policy: the model; None for that of `model`.
        more: arguments of the trainer itself.
        settings: arguments of the trainer's configuration.
    """
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    import torch
    import trl
    from datasets import Dataset

    defaults = {
        "output_dir": str(out / "trainer"),
        "per_device_train_batch_size": 2,
        "num_generations": 2,
        "beta": 0.0,  # no reference model
        "max_completion_length": 4,
        "max_steps": 1,
        "logging_steps": 1,
        "bf16": False,
        "use_cpu": not torch.cuda.is_available(),
        "ddp_backend": "gloo",
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 3,
    }
    return getattr(trl, f"{kind}Trainer")(
        model=model() if policy is None else policy,
        args=getattr(trl, f"{kind}Config")(**{**defaults, **settings}),
        reward_funcs=list(rewards),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=tokenizer(),
        **(more or {}),
    )
