"""A training script as people have it, on a CPU within seconds: a tiny model, with gradient accumulation.

GPT-2, T5, BERT with classes; or gpt-oss, with batches that are one row of documents each (padding-free).

rlhf-patches rehearse --without -- python examples/tiny_trainer.py gpt2
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

import torch
import transformers

VOCABULARY = 64


def model(kind: str) -> Any:
    """With random weights."""
    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": None, "eos_token_id": None}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCABULARY, **sizes))
    if kind == "t5":
        sizes = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8, "decoder_start_token_id": 0}
        return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=VOCABULARY, **sizes))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    if kind == "gpt-oss":
        sizes |= {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
        config = transformers.GptOssConfig(vocab_size=VOCABULARY, layer_types=["full_attention"] * 2, **sizes)
        config.pad_token_id = config.eos_token_id = None
        return transformers.GptOssForCausalLM(config)
    config = transformers.BertConfig(vocab_size=VOCABULARY, num_labels=3, **sizes)
    return transformers.BertForSequenceClassification(config)


def examples(kind: str) -> list[dict[str, Any]]:
    """Of 4 to 11 tokens, each with its label, or with a class."""
    made = []
    for index in range(64):
        generator = torch.Generator().manual_seed(index)
        count = int(torch.randint(4, 12, (1,), generator=generator))
        tokens = torch.randint(3, VOCABULARY, (count,), generator=generator)
        if kind == "gpt-oss":
            made.append({"input_ids": tokens.tolist()})
        else:
            made.append({"input_ids": tokens, "labels": index % 3 if kind == "bert" else tokens})
    return made


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Padded on the right."""

    def padded(each: list[torch.Tensor], value: int) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(each, batch_first=True, padding_value=value)

    tokens, labels = ([row[name] for row in rows] for name in ("input_ids", "labels"))
    return {
        "input_ids": padded(tokens, 0),
        "attention_mask": padded([torch.ones_like(each) for each in tokens], 0),
        "labels": torch.tensor(labels) if isinstance(labels[0], int) else padded(labels, -100),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("gpt2", "t5", "bert", "gpt-oss"))
    kind = parser.parse_args().kind
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,
            max_steps=2,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            ddp_backend="gloo" if "RANK" in os.environ else None,
        )
        collator = transformers.DataCollatorWithFlattening() if kind == "gpt-oss" else collate
        trainer = transformers.Trainer(model(kind), args, train_dataset=examples(kind), data_collator=collator)
        trainer.train()
        print("weights", float(sum(each.double().abs().sum() for each in trainer.model.parameters())).hex())


if __name__ == "__main__":
    main()
