"""Bugs of the catalogue that a rehearsal finds, by name: what it says of the run as released, and with the patch.

Others are in test_rehearsal.py, and trl-dpo-second-eos in trl_before_1; docs/rehearse.md has the whole list.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest

from tests.harness import side_by_side, unpacked
from tests.harness.forkserver import TORCH, TRL, Level, Levels, beside
from tests.patches.transformers import rehearsal_catalogue_ranks as runs

WORKER = runs.__name__
FORMULA, EVALUATION, FUSED = "reference loss", "evaluation loss", "fused loss"
WINDOW, TRAINED, ADAPTERS = "micro-batch weights", "trainable parameters", "adapters"
DOCUMENTS, RATES = "per-document gradients", "learning rates"
LOSS, RATIO, CHECKPOINTING = "initial loss", "initial ratio", "gradient checkpointing"


def folders(*releases: str) -> str:
    """Folders of releases: unpacked wheels, or those of side-by-side."""
    return os.pathsep.join(
        unpacked.folders(each) if "==" in each else str(side_by_side.folder(each)) for each in releases
    )


FLATTENED = (*TORCH, Level("tests.harness.loading:transformers_alone", folders("trl==0.23.0", "transformers-4.57")))
LIGER = Level("tests.harness.loading:torch_and_interpreter", folders("liger-0.8"))
LOADED = "tests.harness.loading:trl_kto_with_liger"
PREFERENCES = (LIGER, Level(LOADED, folders("trl==1.12.0")))
TOOLS = (LIGER, Level(LOADED, folders("trl==0.28.0", "trl-1.5")))
GROUPS = beside("deepspeed-0.18.9", "trl", "transformers-4.57")
MIXTURE = beside("peft-0.18", "peft", "transformers-4.57")


@dataclass(frozen=True)
class Case:
    """One of the worker's, the relation that it deviates from, and a part of what is said."""

    patch: str
    name: str
    said: str
    relation: str = WINDOW
    release: str | None = None
    levels: Levels | None = None
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
    Case("peft-adapter-freeze", "a frozen reference", "adapter policy was made for training", ADAPTERS, "peft-0.18"),
    Case("peft-save-adapter-prefix", "two names", "2 of 4 saved tensors of policy", ADAPTERS, "peft-0.18"),
    Case("peft-lora-merge-drift", "merged", "each merge and its reverse change", ADAPTERS, "peft-0.18"),
    Case("transformers-eval-loss", "evaluated", "evaluation reports 4.66", EVALUATION, ranks=2),
    Case("trl-dpo-liger-settings", "DPO with Liger, robust", "is not the plain loss", FUSED, levels=PREFERENCES),
    Case("trl-functional-dropout", "DPO of OPT", "so that it must be 0.693147", LOSS),
    Case("trl-dropout-ratio", "RLOO with dropout", "as before an update, it is 0.5", RATIO),
    Case("transformers-shared-kv-gradient", "Gemma 4, reentrant", "is not that without checkpointing", CHECKPOINTING),
)
MORE = (
    Case("trl-grpo-truncated-count", "truncated", "0.759 x the mean over the generation's tokens", release="trl-1.5"),
    Case("trl-grpo-dapo-scale", "half of a generation in a step", "0.500 x the mean over the gen", release="trl-1.5"),
    Case("transformers-moe-aux-loss", "mixture on two ranks", "the router's loss has weight 2.000", ranks=2),
    Case("transformers-smoothed-labels", "smoothed and compiled", "the cross entropy of the logits", FORMULA),
    Case("deepspeed-offload-accumulation", "offloaded", "4 of 8 micro-batches", release="deepspeed-0.18.2", ranks=2),
    Case(
        "accelerate-fsdp2-upcast",
        "mixed precision",
        "12 are in bfloat16",
        TRAINED,
        "accelerate-1.13",
        ranks=2,
        verdict="note",
    ),
    Case("transformers-eval-loss", "evaluated, T5", "evaluation reports 7.03", EVALUATION, ranks=2),
    Case("deepspeed-zero3-rare-parameters", "rare, partitioned", "of the gradient comes from no micro-batch", ranks=2),
    Case("peft-layers-to-transform", "one layer", "6 of 9 adapted modules", ADAPTERS, levels=MIXTURE),
    Case("trl-grpo-liger-tools", "tools", "is not the plain loss", FUSED, levels=TOOLS),
    Case("deepspeed-empty-groups", "an empty group", "raises ValueError: zip()", RATES, levels=GROUPS, ranks=2),
    Case(
        "deepspeed-group-learning-rates",
        "own rates",
        "[0.001 0.01] become [0.0001 0.0001]",
        RATES,
        "deepspeed-0.18.9",
        ranks=2,
        verdict="note",
    ),
    Case("trl-kto-liger-reference", "KTO with Liger", "is not the plain loss", FUSED, levels=PREFERENCES),
    Case("trl-precompute-cache", "after another run", "from before the run are not the policy's", LOSS),
    Case("trl-dropout-ratio", "GRPO with dropout", "as before an update, it is", RATIO),
    Case("transformers-router-loss-reentrant", "mixture, reentrant", "is not that without", CHECKPOINTING),
    Case("trl-sft-first-label", "flattened", "another document affects a document", DOCUMENTS, levels=FLATTENED),
)


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.exhaustive) for case in MORE)],
    ids=lambda case: case.name,
)
def test_it_is_found_and_repaired(run_ranks, case):
    levels = case.levels or (beside(case.release, "trl") if case.release else TRL)
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


@pytest.mark.exhaustive
def test_liger_s_losses_that_are_right_or_repaired_hold(run_ranks):
    """22 trainers of TRL 1.12, each of whose losses has both forms."""
    (found,) = run_ranks(WORKER, *runs.WITH_LIGER, "--right", levels=PREFERENCES, ranks=1)
    for name in runs.WITH_LIGER:
        rows = {key: row for key, row in found[name]["on"].items() if key != "acted"}
        assert rows[FUSED]["verdict"] == "holds", name
        assert rows[FUSED]["measured"] != "0e+00", name
        assert not [row for row in rows.values() if row["verdict"] == "deviates"], name
