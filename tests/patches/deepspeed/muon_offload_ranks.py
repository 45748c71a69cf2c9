"""Muon with an optimizer on the CPU: ``--out FOLDER [CASE ...]``, on two ranks, against Muon in float64."""

from __future__ import annotations

import json
import os
from typing import Any

import rlhf_patches
from rlhf_patches.patches.deepspeed.proofs import muon
from rlhf_patches.patches.deepspeed.proofs.on_cpu import OFFLOADED
from rlhf_patches.proving import states

NAME = "deepspeed-muon-offload"
WHOLE = {"reduce_scatter": False}
CASES = {
    "stage 1": muon.Case(stage=1, zero={**OFFLOADED, **WHOLE}),
    "stage 2": muon.Case(stage=2, zero={**OFFLOADED, **WHOLE}),
    "scattered": muon.Case(stage=2, zero=OFFLOADED),
    "on the device": muon.Case(stage=2, zero=WHOLE),
}


def main() -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="*", metavar="CASE")
    options = parser.parse_args()
    muon.start()
    row = rlhf_patches.apply(only=NAME)[NAME]
    found: dict[str, Any] = {"status": row.status.value, "version": row.version}
    for name in options.cases:
        before = states.counts(NAME)
        with states.heard() as messages:
            try:
                found[name] = muon.outcome(CASES[name])
            except ValueError as error:
                found[name] = {"raised": str(error)}
        counts = states.counts(NAME)
        found[name]["counts"] = [now - then for now, then in zip(counts, before, strict=True)]
        found[name]["said"] = [each for each in messages if NAME in each]
    (options.out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
