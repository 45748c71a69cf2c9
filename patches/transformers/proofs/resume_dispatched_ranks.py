"""The samples of each epoch in transformers' Trainer, whole and resumed: ``--out FOLDER``.

As released, with transformers-resume-dispatched, with accelerate-resume-dispatched too, and after revert().
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import rlhf_patches
from rlhf_patches.patches.accelerate.proofs.resume_order_ranks import EPOCHS, Noting, Rows
from rlhf_patches.proving import states

NAMES = ("transformers-resume-dispatched", "accelerate-resume-dispatched")
ROWS, SKIPPED = 24, 2
LOADERS: dict[str, dict[str, Any]] = {"dispatched": {"dispatch_batches": True}, "others": {}}


def trained(loader: str, folder: Path) -> dict[str, Any]:
    from transformers import Trainer, TrainingArguments

    ranks = int(os.environ["WORLD_SIZE"])
    steps = ROWS // 4 // ranks
    stops = [epoch * steps + SKIPPED for epoch in range(EPOCHS)]
    options: dict[str, Any] = {"per_device_train_batch_size": 4, "num_train_epochs": EPOCHS, "report_to": []}
    options |= {"use_cpu": True, "save_strategy": "steps", "save_steps": 1, "disable_tqdm": True}
    options |= {"accelerator_config": LOADERS[loader], "output_dir": str(folder), "remove_unused_columns": False}

    def train(stop: int | None) -> Any:
        model = Noting()
        arguments = TrainingArguments(**options, ddp_backend="gloo" if ranks > 1 else None)
        trainer = Trainer(model, arguments, train_dataset=Rows())
        trainer.train(stop and str(folder / f"checkpoint-{stop}"))
        return model.seen

    whole = train(None)
    options["save_strategy"] = "no"
    return {"left": [whole[stop:] for stop in stops], "resumed": [train(stop) for stop in stops]}


def main() -> None:
    out = states.parser().parse_args().out

    def observe(state: str) -> dict[str, Any]:
        return {loader: trained(loader, out / f"{state}-{loader}") for loader in LOADERS}

    found: dict[str, Any] = {"before": observe("before")}
    for name, state in zip(NAMES, ("after", "both"), strict=True):
        row = rlhf_patches.apply(only=name)[name]
        found[name] = [row.version, row.status.value]
        found[state] = observe(state)
        if state == "after":
            reached = rlhf_patches.report()[name].reached
            found["reached"] = reached and reached.to_dict()
    rlhf_patches.revert()
    found["reverted"] = observe("reverted")
    (out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
