"""A user's training script, as one starts it: ``python five_runs.py RUN``. Two steps of four micro-batches each.

Repairs are on by one line at its top. A plain Trainer with a Qwen2 classifier has a bug of this release; TRL's trainers
do not.
"""

from __future__ import annotations

import sys
from typing import Any

import rlhf_patches

rlhf_patches.apply()

import torch  # noqa: E402
from transformers import Trainer, TrainingArguments  # noqa: E402

from rlhf_patches.patches.trl.proofs import small  # noqa: E402
from tests.patches.trl import no_alarms_ranks as runs  # noqa: E402

STEPS: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 2}


def classifier() -> Any:
    rows = [{"input_ids": torch.tensor([3 + row, 4, 5]), "labels": torch.tensor(0.5)} for row in runs.ROWS]
    arguments = TrainingArguments(output_dir="trainer", **{**small.STEPS, **STEPS})
    return Trainer(runs.classifier(), arguments, train_dataset=rows)


RUNS = {
    "classifier": classifier,
    "SFT": lambda: runs.sft(runs.TEXT, **STEPS),
    "DPO": lambda: runs.beside_reference("DPO", runs.PREFERENCES, **STEPS),
    "Reward": lambda: runs.made("Reward", runs.PREFERENCES, model=runs.classifier, **STEPS),
    "GRPO": lambda: runs.generating("GRPO", ddp_backend=None, **STEPS),
}

if __name__ == "__main__":
    RUNS[sys.argv[1]]().train()
