"""``--out FOLDER``: skyrl-bf16-logits and a model of a megatron-core that cannot leave logits in bfloat16."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from tests.harness import megatron_on_cpu

megatron_on_cpu.install()

import megatron.core
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from rlhf_patches.patches.skyrl import _logits


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, bf16=True)
    model = Float16Module(config, torch.nn.Linear(8, 8))
    report = {
        "megatron-core": megatron.core.__version__,
        "the model itself": _logits.in_its_dtype(model, 1.0) is model,
        "observed": _logits.observed(),
    }
    (options.out / "rank0.json").write_text(json.dumps(report))
