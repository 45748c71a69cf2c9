"""Right runs in bf16, on the GPU if torch sees one: SFT with and without LoRA, and a classifier."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset

import rlhf_patches
from rlhf_patches.patches.trl.proofs import small

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 4,
    "max_steps": 2,
    "bf16": True,
    "use_cpu": not torch.cuda.is_available(),
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
}


def sft(folder: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(vocab_size=99, num_key_value_heads=2, max_position_embeddings=128, **SIZES)
    texts = [" ".join(f"w{(7 * row + place) % 96}" for place in range(8 + row % 24)) for row in range(64)]
    return trl.SFTTrainer(
        model=transformers.Qwen2ForCausalLM(config),
        args=trl.SFTConfig(folder, **SETTINGS),
        train_dataset=Dataset.from_list([{"text": text} for text in texts]),
        processing_class=small.tokenizer(),
        **settings,
    )


def lora(folder: str) -> Any:
    import peft

    return sft(folder, peft_config=peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))


def classifier(folder: str) -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=99, num_labels=3, **SIZES)
    rows = [{"input_ids": [(row + place) % 96 + 3 for place in range(16)], "labels": row % 3} for row in range(64)]
    arguments = transformers.TrainingArguments(folder, **SETTINGS)
    model = transformers.BertForSequenceClassification(config)
    return transformers.Trainer(model, arguments, train_dataset=rows)  # type: ignore[arg-type]


def main() -> None:
    rlhf_patches.apply()
    found: dict[str, Any] = {}
    with contextlib.redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as folder:
        for make in (sft, lora, classifier):
            found[make.__name__] = [each.as_json() for each in rlhf_patches.rehearse(make(folder))]
    print(json.dumps(found))


main()
