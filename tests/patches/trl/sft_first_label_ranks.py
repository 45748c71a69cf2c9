"""Gradients of SFT on flattened batches, and of the examples one by one, in float64: ``--out FOLDER CASE...``.

Each case before apply() of trl-sft-first-label, after it, and after revert(). transformers' own code for FlashAttention
decides what attends to what; only the CUDA kernels that it calls are written down here.
"""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, modeling_flash_attention_utils

import rlhf_patches
from rlhf_patches.patches.trl.proofs import small
from rlhf_patches.proving import states

NAME = "trl-sft-first-label"
DOCUMENTS = [[3, 4, 5, 6, 7], [8, 9], [10, 11, 12, 13, 14, 15, 16], [17, 18, 19]]
CASES: dict[str, dict[str, Any]] = {
    "padding_free": {"padding_free": True},
    "packing": {"packing": True, "max_length": 9},
    "padding_free, pad_to_multiple_of": {"padding_free": True, "pad_to_multiple_of": 24},
    "padding_free, completions": {"padding_free": True, "completions": True},
    "padded": {},
    "padding_free, sdpa": {"padding_free": True, "attention": "sdpa"},
}


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, softmax_scale: float) -> torch.Tensor:
    """Causal attention of one sequence: what each takes and returns is [tokens, heads, size]."""
    scores = torch.einsum("qhd,khd->hqk", query, key) * softmax_scale
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, float("-inf")).softmax(-1), value)


def flash(
    query: Any, key: Any, value: Any, dropout_p: float = 0.0, softmax_scale: Any = None, causal: bool = False
) -> Any:
    """In place of `flash_attn_func`: [batch, tokens, heads, size]."""
    assert causal
    return torch.stack([attend(q, k, v, softmax_scale) for q, k, v in zip(query, key, value, strict=True)])


def flash_varlen(
    query: Any,
    key: Any,
    value: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float = 0.0,
    softmax_scale: Any = None,
    causal: bool = False,
) -> Any:
    """In place of `flash_attn_varlen_func`: sequences of [tokens, heads, size] one after the other."""
    assert causal
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    lengths = cu_seqlens_q.diff().tolist()
    parts = (each.split(lengths) for each in (query, key, value))
    return torch.cat([attend(q, k, v, softmax_scale) for q, k, v in zip(*parts, strict=True)])


def kernels(*_: Any) -> tuple[Any, ...]:
    """In place of transformers' look for the package, which wants CUDA."""
    own = modeling_flash_attention_utils
    return flash, flash_varlen, own._pad_input, own._unpad_input


class Gradients(TrainerCallback):
    """What the optimizer gets."""

    def __init__(self) -> None:
        self.found: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.found = {name: each.grad.clone() for name, each in kwargs["model"].named_parameters()}


def one_by_one(model: Any, completions: bool) -> dict[str, torch.Tensor]:
    """The mean over the targets of all documents, each of which the model sees by itself."""
    model = copy.deepcopy(model)
    model.config._attn_implementation = "eager"
    model.zero_grad()
    losses = []
    for document in DOCUMENTS:
        ids = torch.tensor([document])
        logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        losses.append(-logprobs.gather(-1, ids[0, 1:, None])[-1 if completions else 0 :].flatten())
    torch.cat(losses).mean().backward()
    return {name: each.grad for name, each in model.named_parameters()}


def trained(case: str) -> dict[str, Any]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    settings = {"max_length": 64, "learning_rate": 0.0, "max_steps": 1, "per_device_train_batch_size": 4, **CASES[case]}
    attention, completions = settings.pop("attention", "flash_attention_2"), settings.pop("completions", False)
    model = small.model().double()
    model.config._attn_implementation = attention
    rows: dict[str, Any] = {"input_ids": DOCUMENTS}
    if completions:
        rows["completion_mask"] = [[0] * (len(document) - 1) + [1] for document in DOCUMENTS]
        settings["completion_only_loss"] = True
    trainer = SFTTrainer(
        model,
        args=SFTConfig(output_dir=states.folder(), **{**small.STEPS, **settings}),
        train_dataset=Dataset.from_dict(rows),
        processing_class=small.tokenizer(),
    )
    seen = Gradients()
    trainer.add_callback(seen)
    trainer.train()
    right = one_by_one(trainer.model, completions)
    found = torch.cat([seen.found[name].flatten() for name in right])
    expected = torch.cat([each.flatten() for each in right.values()])
    return {
        "error": float((found - expected).norm() / expected.norm()),
        "gradient": [float(value).hex() for value in found[:40]],
        "loss": [entry["train_loss"] for entry in trainer.state.log_history if "train_loss" in entry],
    }


def collated() -> dict[str, Any]:
    """Batches of labels that a data set brings: the tokens, and those that are shifted already."""
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    tokens = [[3, 4, 5], [8, 9]]
    labels = {"copied": tokens, "shifted": [[*each[1:], -100] for each in tokens]}
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    found = {}
    for name, rows in labels.items():
        batch = collate([{"input_ids": ids, "labels": row} for ids, row in zip(tokens, rows, strict=True)])
        found[name] = {key: value.tolist() for key, value in batch.items()}
    # Each trained label is the token at its place, by chance.
    alike = collate([{"input_ids": [4, 4, 4], "labels": [4, 4, -100]}, {"input_ids": [9, 9], "labels": [9, -100]}])
    found["shifted, of one word"] = {key: value.tolist() for key, value in alike.items()}
    answers = [{"input_ids": ids, "completion_mask": [0, *[1] * (len(ids) - 1)]} for ids in tokens]
    found["completions"] = {key: value.tolist() for key, value in collate(answers).items()}
    alone = [{"input_ids": ids, "completion_mask": [1] * len(ids)} for ids in tokens]
    found["completions without a prompt"] = {key: value.tolist() for key, value in collate(alone).items()}
    whole = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True, completion_only_loss=False)
    found["prompts too"] = {key: value.tolist() for key, value in whole(answers).items()}
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True, pad_to_multiple_of=8)
    found["padded"] = {key: value.tolist() for key, value in collate([{"input_ids": ids} for ids in tokens]).items()}
    return found


def main() -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="+")
    options = parser.parse_args()
    modeling_flash_attention_utils._lazy_imports = kernels
    import trl  # noqa: F401

    report: dict[str, Any] = {}
    for state in ("before", "after", "reverted"):
        if state == "after":
            row = rlhf_patches.apply(only=NAME)[NAME]
            report.update(version=row.version, status=row.status.value)
        report[state] = {case: trained(case) for case in options.cases}
        if state == "after" and (reached := rlhf_patches.report()[NAME].reached):
            report["reached"] = reached.to_dict()
        report.setdefault("batches", {})[state] = collated()
        rlhf_patches.revert()
    Path(options.out, f"rank{os.environ['RANK']}.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
