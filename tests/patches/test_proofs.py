"""Proofs of the built-in patches: what `rlhf-patches prove` runs, in this environment as it is."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_patches.definitions.registry import Registered
from rlhf_patches.offline import evaluate
from rlhf_patches.patches import plugin
from rlhf_patches.proving import lookup
from rlhf_patches.proving.proof import Proof
from tests.harness.by_case import exhaustive_but
from tests.harness.forkserver import PACKAGES

PATCHES = Path(importlib.import_module("rlhf_patches.patches").__path__[0])
MODULES = {
    module: importlib.import_module(f"rlhf_patches.patches.{module}")
    for module in sorted(
        ".".join(file.relative_to(PATCHES).with_suffix("").parts)
        for file in PATCHES.glob("*/proofs/*.py")
        if "PROOF = " in file.read_text()
    )
}
BUILT_IN = {patch.name: patch for patch in plugin.rlhf_patches()}
LOCATED = {
    case.patch: (module.PROOF, lookup.worker_of(module.__name__, module.PROOF))
    for module in MODULES.values()
    for case in module.PROOF.cases
}
PROVEN = [patch for patch in BUILT_IN.values() if patch.name in LOCATED]
CANARIES = ("verl-rloo-singletons", "transformers-moe-aux-loss")
EXCLUDING = (
    *("transformers-first-token-count", "transformers-smoothed-labels", "transformers-packed-documents"),
    *("transformers-prompt-tuning-count", "slime-eps-clip-c"),
)
"""What their conditions tell is where the bug cannot be."""
UNTOLD = ("verl-padding-only-micro-batch", "trl-chunked-nll-zero3", "trl-chunked-divergence-zero3")
"""Of their proofs' runs a condition knows nothing: of the release, or whether ZeRO-3 gathers the head itself."""
DEAR = (
    *("trl-grpo-dapo-scale", "trl-resume-order", "trl-grpo-truncated-count", "peft-save-adapter-prefix"),
    *("transformers-smoothed-labels", "transformers-resume-weights", "transformers-eval-loss"),
    *("trl-distillation-scale", "verl-gmpo-micro-batches"),
)
"""Above two CPU seconds; tests of their own run the same workers."""
FRAMEWORKS = ("torch", "transformers", "numpy", "accelerate", "deepspeed", "megatron", "trl", "peft", "vllm")


@pytest.mark.parametrize("module", MODULES)
def test_it_is_found_by_its_patch(module):
    package, _, name = f"rlhf_patches.patches.{module}".rpartition(".")
    proof = MODULES[module].PROOF
    assert isinstance(proof, Proof)
    for case in proof.cases:
        patch = BUILT_IN[case.patch]
        assert lookup.proof_of(patch) == (proof, f"{package}.{proof.worker or f'{name}_ranks'}")
        assert case.framework == patch.distribution
        assert len(case.title) <= 33, "more does not fit into the tables"


def test_no_framework_is_imported_to_find_them():
    code = f"""
import sys
from rlhf_patches.patches import plugin
from rlhf_patches.proving import lookup
assert sum(lookup.proof_of(patch) is not None for patch in plugin.rlhf_patches()) >= {len(MODULES)}
print([name for name in {FRAMEWORKS} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_what_a_proof_needs_may_have_a_least_release():
    """Neither a module without metadata nor one that is not there is an error."""
    there = ("pytest", "pytest>=1", "json")
    missing = [f"pytest>={10**6}", "json>=1", "no_such_module", "no_such_module>=1", "no_such_package.module"]
    assert lookup.missing([*there, *missing]) == missing


def proven(*names):
    """The rows of `rlhf-patches prove`, which must all be of bugs that are there and repaired."""
    command = [sys.executable, "-m", "rlhf_patches", "prove", "--json", *names]
    done = subprocess.run(command, capture_output=True, text=True)
    rows = json.loads(done.stdout)
    assert {row["verdict"] for row in rows} <= {"repaired", "unaffected"}, done.stdout
    shown = {row["patch"] for row in rows if row["verdict"] == "repaired"}
    assert shown == {row["patch"] for row in rows}, "each patch has a case that its bug is in"
    assert done.returncode == (0 if rows else 2), done.stderr
    return shown


@pytest.mark.parametrize("name", exhaustive_but(CANARIES, CANARIES[0]))
def test_by_the_command(name):
    """As a user asks, on the frameworks of this environment; two ranks, and one."""
    assert proven(name) == {name}


@pytest.mark.exhaustive
def test_what_applies_here_is_repaired_here():
    proven()


@pytest.mark.parametrize("patch", exhaustive_but(PROVEN, *(each for each in PROVEN if each.name not in DEAR)), ids=str)
def test_it_is_repaired_where_the_bug_is_and_its_condition_is_told(patch, run_ranks):
    """The proof's worker on forks of a process that has loaded what it takes: else as the command does."""
    (row,) = evaluate.inspect([Registered(patch, "tests")])
    proof, worker = LOCATED[patch.name]
    if row.status != "applies" or lookup.missing(proof.needs):
        pytest.skip(f"{patch.name} is not for this environment: {row.status}")
    settings = {"HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu", **dict(proof.settings)}
    reports = run_ranks(worker, *proof.arguments, levels=PACKAGES, ranks=proof.ranks, **settings)
    rows = [each for each in proof.rows(reports) if each.case.patch == patch.name]
    assert any(each.repaired for each in rows)
    assert all(each.repaired or each.unaffected for each in rows), rows
    for reached in filter(None, (report.get("reached") for report in reports)):
        if not patch.conditions:
            continue
        if patch.name in UNTOLD:
            assert reached.get("asked", 0) == 0 < reached["calls"]
        elif patch.name in EXCLUDING:
            assert reached["held"] == 0 <= reached["asked"] < reached["calls"]
        else:
            assert 0 < reached["held"] <= reached["asked"] <= reached["calls"]


@pytest.mark.parametrize("patch", [patch for patch in BUILT_IN.values() if patch.kind == "patch"], ids=str)
def test_each_patch_has_a_proof_or_says_why_not(patch):
    assert patch.name in LOCATED or lookup.why_none(patch)


def test_most_patches_that_can_have_one_do():
    assert len(PROVEN) >= 100
