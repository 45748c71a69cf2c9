"""Two steps of GRPO as released, and observed by trl-grpo-dapo-scale: ``--out FOLDER``, on one rank."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import rlhf_patches
from rlhf_patches.patches.trl.proofs import small
from rlhf_patches.proving import states

NAME = "trl-grpo-dapo-scale"


def lengths(completions: list[str], **_: Any) -> list[float]:
    return [float(len(each)) for each in completions]


def trained(out: Path) -> list[str]:
    """Every weight after two steps, of which each is half a generation."""
    settings = {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "max_steps": 2, "learning_rate": 0.1}
    trainer = small.rollouts("GRPO", out, [lengths], **settings)
    trainer.train()
    return [weight.double().sum().item().hex() for weight in trainer.model.parameters()]


def main() -> None:
    out = states.parser().parse_args().out
    found: dict[str, Any] = {"released": trained(out)}
    for state, setting in (("observed", "1"), ("patched", "0")):
        os.environ["RLHF_PATCHES_OBSERVE"] = setting
        rlhf_patches.apply(only=NAME)
        found[state] = trained(out)
        row = rlhf_patches.report()[NAME]
        found[f"row, {state}"] = row.to_dict()
        found[f"in force, {state}"] = rlhf_patches.in_force(NAME)
    (out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
