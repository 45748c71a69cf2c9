"""Runs of TRL's trainers that nothing is wrong with, all patches on: ``--out FOLDER [CASE ...]``.

Two steps of two micro-batches each. Of each run, what rlhf_patches has logged, and the calls of
transformers-accumulation-scale in which it could tell, and in which it held; or why it cannot be made in this release.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import Qwen2Config, Qwen2ForSequenceClassification

import rlhf_patches
from rlhf_patches.engine import log
from rlhf_patches.patches.transformers import _accumulation
from rlhf_patches.patches.trl.proofs import small
from rlhf_patches.patches.trl.proofs.grpo_dapo_scale_ranks import of_some_words
from rlhf_patches.proving import states

NAME = "transformers-accumulation-scale"
ROWS = range(16)
TEXT = [{"text": f"w{row} w5 w6 w7 w8"[: 8 + row % 5]} for row in ROWS]
COMPLETIONS = [{"prompt": f"w{row} w1 ", "completion": "w2 w3 w4"} for row in ROWS]
PREFERENCES = [{"prompt": "w1 w2 ", "chosen": f"w{row} w5", "rejected": f"w{row + 1} w6 w7"} for row in ROWS]
LABELS = [{"prompt": "w1 w2 ", "completion": f"w{row} w5", "label": bool(row % 2)} for row in ROWS]
LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def named(name: str) -> Any:
    """Of TRL, wherever this release has it."""
    if hasattr(trl, name):
        return getattr(trl, name)
    module = f"trl.experimental.{name.removesuffix('Trainer').removesuffix('Config').lower()}"
    return getattr(__import__(module, fromlist=[name]), name)


def made(
    kind: str, data: list[Any], *, model: Callable[[], Any] = small.model, more: Any = None, **settings: Any
) -> Any:
    steps = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 2}
    config = named(f"{kind}Config")(output_dir="trainer", **{**small.STEPS, **steps, **settings})
    data_set = Dataset.from_list(data)
    tokenizer = small.tokenizer()
    return named(f"{kind}Trainer")(
        model=model(), args=config, train_dataset=data_set, processing_class=tokenizer, **(more or {})
    )


def classifier() -> Any:
    return Qwen2ForSequenceClassification(
        Qwen2Config(**{**small.model().config.to_dict(), "num_labels": 1, "pad_token_id": 0})
    )


def beside_reference(kind: str, data: list[Any], **settings: Any) -> Any:
    return made(kind, data, more={"ref_model": small.model()}, **settings)


def generating(kind: str, **settings: Any) -> Any:
    steps = {"max_steps": 2, "gradient_accumulation_steps": 2}
    return small.rollouts(kind, Path(), [of_some_words], **{**small.STEPS, **steps, **settings})


sft = functools.partial(made, "SFT")
CASES: dict[str, Callable[[], Any]] = {
    "SFT": lambda: sft(TEXT),
    "SFT, nll": lambda: sft(TEXT, loss_type="nll"),
    "SFT, chunked_nll": lambda: sft(TEXT, loss_type="chunked_nll"),
    "SFT, dft": lambda: sft(TEXT, loss_type="dft"),
    "SFT, packing": lambda: sft(TEXT, packing=True, max_length=8),
    "SFT, wrapped": lambda: sft(TEXT, packing=True, max_length=8, packing_strategy="wrapped"),
    "SFT, padding_free": lambda: sft(TEXT, padding_free=True, max_length=None),
    "SFT, LoRA": lambda: sft(TEXT, more={"peft_config": LORA}),
    "SFT, LoRA, chunked_nll": lambda: sft(TEXT, more={"peft_config": LORA}, loss_type="chunked_nll"),
    "SFT, completions": lambda: sft(COMPLETIONS),
    "SFT, prompts too": lambda: sft(COMPLETIONS, completion_only_loss=False),
    "SFT, checkpointing": lambda: sft(TEXT, gradient_checkpointing=True),
    "SFT, NEFTune": lambda: sft(TEXT, neftune_noise_alpha=5.0),
    "SFT, bf16": lambda: sft(TEXT, bf16=True),
    "SFT, own tokens": lambda: sft(TEXT, average_tokens_across_devices=False),
    "DPO": lambda: beside_reference("DPO", PREFERENCES),
    "DPO, LoRA": lambda: made("DPO", PREFERENCES, more={"peft_config": LORA}),
    "DPO, padding_free": lambda: beside_reference("DPO", PREFERENCES, padding_free=True),
    "DPO, two losses": lambda: beside_reference("DPO", PREFERENCES, loss_type=["sigmoid", "sft"]),
    "KTO": lambda: beside_reference("KTO", LABELS),
    "Reward": lambda: made("Reward", PREFERENCES, model=classifier),
    "ORPO": lambda: made("ORPO", PREFERENCES),
    "CPO": lambda: made("CPO", PREFERENCES),
    "GRPO": lambda: generating("GRPO"),
    "GRPO, grpo": lambda: generating("GRPO", loss_type="grpo"),
    "RLOO": lambda: generating("RLOO"),
}


def main() -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="*", default=[*CASES])
    options = parser.parse_args()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    os.chdir(options.out)
    rlhf_patches.apply()
    found: dict[str, Any] = {"version": trl.__version__}
    for case in options.cases:
        _accumulation._logged.clear()
        log._logged.clear()
        before = rlhf_patches.report()[NAME].reached
        with states.heard() as said:
            CASES[case]().train()
        after = rlhf_patches.report()[NAME].reached
        calls, asked, held = (getattr(after, name) - getattr(before, name) for name in ("calls", "asked", "held"))
        found[case] = {"said": said, "calls": calls, "asked": asked, "held": held}
    (options.out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
