"""Packed rows of recurrent models, and a step of Trainer on them: ``--out FOLDER``, on one rank."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
import transformers
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

import rlhf_patches
from rlhf_patches.patches.transformers._recurrent_families import FAMILIES
from rlhf_patches.patches.transformers.proofs import packed_documents_ranks as rows
from rlhf_patches.patches.transformers.proofs.router_loss_reentrant_ranks import fields_of
from rlhf_patches.proving import states

NAME = "transformers-packed-recurrence"
SIZES: dict[str, Any] = {"vocab_size": rows.VOCABULARY, "hidden_size": 16, "intermediate_size": 16}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False, "initializer_range": 0.3}
SIZES |= {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
SIZES |= {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_expand": 2, "mamba_dt_rank": 4}
SIZES |= {"state_size": 4, "shared_intermediate_size": 16, "experts_implementation": "eager"}
OF: dict[str, dict[str, Any]] = {
    "GraniteMoeHybrid": {"layer_types": ["mamba", "attention"]},
    "Jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "use_mamba_kernels": False},
    "MiniMax": {},
    "Mamba": {},
    "Llama": {},
}


def made(family: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")
    known = fields_of(config)
    sizes = {name: value for name, value in SIZES.items() if name in known}
    return getattr(transformers, f"{family}ForCausalLM")(config(**{**sizes, **OF[family]}))


def apart(family: str) -> float:
    """How far the logits of packed documents are from those of the documents alone."""
    model = made(family).eval()
    batch = DataCollatorWithFlattening()([{"input_ids": each.tolist()} for each in rows.documents()])
    with torch.no_grad():
        packed = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits[0]
        alone = torch.cat([model(input_ids=each[None], use_cache=False).logits[0] for each in rows.documents()])
    return float((packed - alone).norm() / alone.norm())


def padded(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(each["input_ids"]) for each in features], True)
    return {"input_ids": ids, "labels": ids}


def trained(family: str, collator: Any, batch: int = 3) -> dict[str, Any]:
    """What the condition of a step was, and what was said."""
    data = [{"input_ids": each.tolist()} for each in rows.documents()]
    options: dict[str, Any] = {"max_steps": 1, "report_to": [], "use_cpu": True, "save_strategy": "no"}
    arguments = TrainingArguments(states.folder(), per_device_train_batch_size=batch, disable_tqdm=True, **options)
    before = states.counts(NAME)
    with states.heard() as messages:
        Trainer(made(family), arguments, train_dataset=data, data_collator=collator).train()
    counts = states.counts(NAME)
    return {
        "counts": [now - then for now, then in zip(counts, before, strict=True)],
        "said": [each for each in messages if NAME in each],
    }


def main() -> None:
    out = states.parser().parse_args().out
    row = rlhf_patches.apply(only=NAME)[NAME]
    flat = DataCollatorWithFlattening
    found: dict[str, Any] = {
        "status": row.status.value,
        "missing": [prefix for prefix in FAMILIES.values() if not hasattr(transformers, f"{prefix}ForCausalLM")],
        "apart": {family: apart(family) for family in OF},
        "padded": trained("Jamba", padded),
        "one document": trained("Jamba", flat(), batch=1),
        "borders": trained("Jamba", flat(return_seq_idx=True)),
        "Llama": trained("Llama", flat()),
        "packed": trained("Jamba", flat()),
        "again": trained("GraniteMoeHybrid", flat()),
    }
    (out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
