"""Muon for a model that is built within zero.Init, or outside: ``--out FOLDER``, on one rank."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

import torch

import rlhf_patches
from rlhf_patches.patches.deepspeed.proofs import muon
from rlhf_patches.proving import states

NAME = "deepspeed-muon-zero-init"


def main() -> None:
    options = states.parser().parse_args()
    muon.start()
    from deepspeed import set_optimizer_flags

    found: dict[str, Any] = {}
    row = rlhf_patches.apply(only=NAME)[NAME]
    found["status"], found["version"] = row.status.value, row.version
    for name, case in {
        "outside": muon.Case(stage=3),
        "stage 2": muon.Case(stage=2),
        "within": muon.Case(stage=3, built=True),
    }.items():
        with states.heard() as messages:
            found[name] = muon.outcome(case)
        found[name].update(counts=states.counts(NAME), said=[each for each in messages if NAME in each])
    model = torch.nn.Linear(2, 2)
    set_optimizer_flags(SimpleNamespace(optimizer_name="adam"), model)
    found["adam"] = states.counts(NAME)
    (options.out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
