"""The user's code between a trainer and its loss, steps or rollouts: off against on, bit for bit where no bug is."""

from __future__ import annotations

import fnmatch

import pytest

from hunt import frameworks
from rlhf_patches.patches.catalogue import LISTED
from tests.harness import users_code
from tests.harness.by_case import exhaustive_but

# Not an own step, which may divide gradients.
HANDED_ON = ("nothing", "handed on", "own count", "own order", "own loader", "own optimizer")
AS_RELEASED = ("nothing",)
BUGS = {
    "transformers-accumulation-scale": {
        "transformers/t5": HANDED_ON,
        "transformers/bert-[ct]*s": HANDED_ON,
        "transformers/mixtral": HANDED_ON,
        "trl/sft-gpt_oss": HANDED_ON,
    },
    "trl-distillation-scale": {"trl/gold": AS_RELEASED, "trl/gkd": AS_RELEASED},
    # Its step calls no `compute_loss`.
    "trl-online-dpo-accumulation": {"trl/online_dpo": ("nothing", "handed on", "one more term", "divided")},
    # With an own `compute_loss` it is left as released.
    "transformers-eval-loss": {"*/*, evaluated": AS_RELEASED},
}
"""By patch, trainers and customizations where the bug is; in all other cells each number keeps its bits."""

NOT_REACHED = {
    "trl-grpo-tool-lockstep": "test_grpo_tool_lockstep.py",
    "trl-online-dpo-server-padding": "test_online_dpo.py",
    "trl-online-dpo-sleep-weights": "test_online_dpo.py",
    "trl-online-dpo-tensor-parallel": "test_online_dpo.py",
    "peft-disable-adapter-restore": "test_disable_adapter_restore.py",
    "peft-lora-merge-drift": "test_lora_merge_drift.py",
}
"""Those that need an engine or a merge, and the module that has the user's own in between."""


@pytest.fixture(scope="session", params=exhaustive_but([1, 2], 2), ids=["one rank", "two ranks"])
def both(request, run_ranks):
    levels, ranks = frameworks.levels("trl", None), request.param

    def run(*patches):
        return run_ranks("tests.harness.users_code", *patches, levels=levels, ranks=ranks)[0]

    return ranks, run(), run("--patches", "")


def has_bug(cell):
    kind = "".join([cell.trainer, *(f", {name}" for name in ("evaluated",) if name in cell.settings)])
    for patch, where in BUGS.items():
        for glob, customs in where.items():
            if cell.custom in customs and fnmatch.fnmatchcase(kind, glob):
                return None if patch == "trl-distillation-scale" and not scaled(cell) else patch
    return None


def scaled(cell):
    """GKD is too small by the ranks, GOLD by the micro-batches."""
    return cell.trainer == "trl/gold" or "ranks" in cell.settings


def test_only_the_bug_is_repaired(both):
    ranks, released, patched = both
    wrong = []
    for cell in users_code.cells(ranks):
        off, on = (each["cells"][cell.name] for each in (released, patched))
        bug, one, other = has_bug(cell), off["outcome"], on["outcome"]
        different = [name for name in {**one, **other} if one.get(name) != other.get(name)]
        if "cannot" not in one and bool(different) != (bug is not None):
            wrong.append(f"{cell.name}: {different[:3] or 'nothing'} differ; expected: {bug or 'nothing'}")
        if "raised" in one:
            wrong.append(f"{cell.name} as released: {one['raised']}")
    assert not wrong, "\n".join(wrong)


def test_each_patch_of_a_trainer_is_reached(both):
    ranks, _, patched = both
    reached = {name for cell in patched["cells"].values() for name in cell["reached"]}
    frameworks_here = ("accelerate-", "peft-", "transformers-", "trl-")
    of_trainers = {each.name for each in LISTED if each.name.startswith(frameworks_here)}
    missing = {name for name in patched["applied"] if name in of_trainers and "watch" not in name} - reached
    if ranks == 1:
        missing -= {"transformers-eval-loss"}
        assert missing == {*NOT_REACHED} & {*patched["applied"]}
    else:
        assert "transformers-eval-loss" in reached
