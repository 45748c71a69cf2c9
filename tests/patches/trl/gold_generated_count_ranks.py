"""Gradients of GOLD's trainer on generated completions: ``--out FOLDER CASE...``.

Each case of distillation_scale_ranks.py as released, with trl-gkd-generated-count, and with trl-distillation-scale too.
"""

from __future__ import annotations

import json
import os
from typing import Any

from trl.experimental.gold import GOLDConfig, GOLDTrainer

import rlhf_patches
from rlhf_patches.patches.trl.proofs import distillation_scale_ranks as worker
from rlhf_patches.proving import states

NAME = "trl-gkd-generated-count"


class Loads(GOLDTrainer):
    """Has a loader of its own."""

    def get_train_dataloader(self) -> Any:
        return super().get_train_dataloader()


def main() -> None:
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    worker.MORE["mixed"] = {"lmbda": 0.5}
    worker.KINDS["Loads"] = (Loads, GOLDConfig)
    parser = states.parser()
    parser.add_argument("cases", nargs="+")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for state, names in {"before": (), "after": (NAME,), "both": (NAME, worker.NAME)}.items():
        rows: Any = rlhf_patches.apply(only=names) if names else {}
        found["status"] = [rows[name].status.value for name in names]
        found[state] = {case: worker.trained(case) for case in options.cases}
        if state == "after":
            reached = rlhf_patches.report()[NAME].reached
            found["reached"] = reached and reached.to_dict()
        rlhf_patches.revert()
    (options.out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found, indent=1))
