"""Bugs of the catalogue that a rehearsal finds, by name: what it says of the run as released, and with the patch.

Others are in test_rehearsal.py, and trl-dpo-second-eos in trl_before_1; docs/rehearse.md has the whole list.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.harness.forkserver import TRL, beside
from tests.patches.transformers import rehearsal_catalogue_ranks as runs

WORKER = runs.__name__
FORMULA = "reference loss"
WINDOW, TRAINED = "micro-batch weights", "trainable parameters"


@dataclass(frozen=True)
class Case:
    """One of the worker's, the relation that it deviates from, and a part of what is said."""

    patch: str
    name: str
    said: str
    relation: str = WINDOW
    release: str | None = None
    ranks: int = 1
    verdict: str = "deviates"


CASES = (
    Case(
        "trl-grpo-dapo-scale",
        "two generations in a step",
        "2.000 x the mean over the generation's tokens",
        release="trl-1.5",
    ),
    Case("trl-online-dpo-accumulation", "online", "4.000 x the mean over micro-batches"),
    Case("peft-disable-adapter-restore", "a frozen half", "that were frozen require a gradient after", TRAINED),
)
MORE = (
    Case("trl-grpo-truncated-count", "truncated", "0.759 x the mean over the generation's tokens", release="trl-1.5"),
    Case("trl-grpo-dapo-scale", "half of a generation in a step", "0.500 x the mean over the gen", release="trl-1.5"),
    Case("transformers-moe-aux-loss", "mixture on two ranks", "the router's loss has weight 2.000", ranks=2),
    Case("transformers-smoothed-labels", "smoothed and compiled", "the cross entropy of the logits", FORMULA),
    Case("deepspeed-offload-accumulation", "offloaded", "4 of 8 micro-batches", release="deepspeed-0.18.2", ranks=2),
    Case("accelerate-fsdp2-upcast", "mixed precision", "12 are in bfloat16", TRAINED, "accelerate-1.13", 2, "note"),
)


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.exhaustive) for case in MORE)],
    ids=lambda case: case.name,
)
def test_it_is_found_and_repaired(run_ranks, case):
    levels = beside(case.release, "trl") if case.release else TRL
    found = run_ranks(WORKER, case.name, levels=levels, ranks=case.ranks)
    for of_rank in found:
        released, repaired = (of_rank[case.name][patches] for patches in ("off", "on"))
        assert released[case.relation]["verdict"] == case.verdict
        assert case.said in released[case.relation]["text"]
        assert released["acted"] == {"repaired": [], "ran": []}
        acted = repaired.pop("acted")
        assert repaired[case.relation]["verdict"] == "holds"
        assert not [row for row in repaired.values() if row["verdict"] == "deviates"]
        assert case.patch in acted["repaired"] + acted["ran"]
