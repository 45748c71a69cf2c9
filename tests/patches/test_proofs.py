"""Proofs of the built-in patches: what `rlhf-patches prove` runs, in this environment as it is."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_patches.patches import plugin
from rlhf_patches.proving import found
from rlhf_patches.proving.proof import Proof

PATCHES = Path(importlib.import_module("rlhf_patches.patches").__path__[0])
PROOFS = sorted(
    ".".join(file.relative_to(PATCHES).with_suffix("").parts)
    for file in PATCHES.glob("*/proofs/*.py")
    if "PROOF = " in file.read_text()
)
BUILT_IN = {patch.name: patch for patch in plugin.rlhf_patches()}
FRAMEWORKS = ("torch", "transformers", "numpy", "accelerate", "deepspeed", "megatron", "trl", "peft", "vllm")


@pytest.mark.parametrize("module", PROOFS)
def test_it_is_found_by_its_patch(module):
    package, _, name = f"rlhf_patches.patches.{module}".rpartition(".")
    proof = importlib.import_module(f"{package}.{name}").PROOF
    assert isinstance(proof, Proof)
    for case in proof.cases:
        patch = BUILT_IN[case.patch]
        assert found.proof_of(patch) == (proof, f"{package}.{proof.worker or f'{name}_ranks'}")
        assert case.framework == patch.distribution
        assert len(case.title) <= 33, "more does not fit into the tables"


def test_no_framework_is_imported_to_find_them():
    code = f"""
import sys
from rlhf_patches.patches import plugin
from rlhf_patches.proving import found
assert sum(found.proof_of(patch) is not None for patch in plugin.rlhf_patches()) >= {len(PROOFS)}
print([name for name in {FRAMEWORKS} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_what_applies_here_is_repaired_here():
    """As a user asks: by the command, on the frameworks of this environment."""
    done = subprocess.run([sys.executable, "-m", "rlhf_patches", "prove", "--json"], capture_output=True, text=True)
    rows = json.loads(done.stdout)
    assert {row["verdict"] for row in rows} <= {"repaired", "unaffected"}, done.stdout
    shown = {row["patch"] for row in rows if row["verdict"] == "repaired"}
    assert shown == {row["patch"] for row in rows}, "each patch has a case that its bug is in"
    assert done.returncode == (0 if rows else 2), done.stderr


@pytest.mark.parametrize("patch", [patch for patch in BUILT_IN.values() if patch.kind == "patch"], ids=str)
def test_each_patch_has_a_proof_or_says_why_not(patch):
    assert found.proof_of(patch) is not None or found.why_none(patch)


def test_most_patches_that_can_have_one_do():
    assert sum(found.proof_of(patch) is not None for patch in BUILT_IN.values()) >= 45
