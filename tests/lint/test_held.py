"""Every patch's tests say what holds it: to each of the rules in docs/writing-a-patch.md, and to what its page claims.

A module-level literal of tests/patches/FRAMEWORK/test_BUG.py, which is not imported here; what it has to be is in
rlhf_patches/testing/rules.py, and a plugin's contract asks for the same.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from rlhf_patches.definitions import registry
from rlhf_patches.definitions.patch import Patch
from rlhf_patches.patches.catalogue import LISTED
from rlhf_patches.testing import checks, rules

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests" / "patches"
ELSEWHERE = {
    "megatron_bridge/no_sync_reentry": "megatron_core/test_no_sync.py",
    "megatron_core/moe_auxiliary_context": "megatron_core/test_moe_auxiliary.py",
    "megatron_core/moe_auxiliary_global": "megatron_core/test_moe_auxiliary.py",
    "megatron_core/moe_auxiliary_padding": "megatron_core/test_moe_auxiliary.py",
    "megatron_core/moe_auxiliary_per_token": "megatron_core/test_moe_auxiliary.py",
    "megatron_lm/no_sync_reentry": "megatron_core/test_no_sync.py",
    "slime/no_sync_reentry": "megatron_core/test_no_sync.py",
    "swift/no_sync_reentry": "megatron_core/test_no_sync.py",
    "verl/no_sync_reentry": "megatron_core/test_no_sync.py",
    "skyrl/entropy_backward": "skyrl/test_logprob_backward.py",
    "swift/logprob_entropy": "swift/test_logits.py",
    "swift/vocab_parallel_logprob_gradient": "swift/test_logits.py",
    "swift/null_ref_context_hf": "swift/test_null_ref_context.py",
    "transformers/packed_short_convolution": "transformers/test_packed_state_space.py",
    "trl/chunked_divergence_zero3": "trl/test_chunked_nll_zero3.py",
    "trl/dpo_second_eos": "trl_before_1/test_dpo_second_eos.py",
    "trl/vllm_raw_logprobs": "trl_on_vllm/test_vllm_raw_logprobs.py",
    "trl/vllm_serve_dead_worker": "trl_on_vllm/test_vllm_serve_dead_worker.py",
}
"""By patch, the module of tests that says it, where that is not test_BUG.py; it may be one for several patches."""


def by_module() -> dict[str, list[Patch]]:
    """By module of tests, the patches that it is for."""
    found: dict[str, list[Patch]] = {}
    patches = {item.patch.name: item.patch for item in registry.load()[0]}
    for listed in LISTED:
        patch = patches[listed.name]
        if isinstance(patch, Patch):
            framework, _, bug = listed.path.partition(":")[0].removeprefix("rlhf_patches.patches.").partition(".")
            module = ELSEWHERE.get(f"{framework}/{bug}", f"{framework}/test_{bug}.py")
            found.setdefault(module, []).append(patch)
    return found


def held(file: Path) -> Any:
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["RULE_COVERAGE"]:
            return ast.literal_eval(node.value)
    return None


@pytest.mark.parametrize("module", sorted(by_module()))
def test_what_holds_a_patch_is_named_in_its_tests(module):
    file = TESTS / module
    assert file.is_file(), f"no such module; where {module} is tested elsewhere, say so in ELSEWHERE"
    found = held(file)
    assert isinstance(found, dict), "it has no literal RULE_COVERAGE = {...}: see docs/writing-a-patch.md"
    checks.is_held(by_module()[module], found, rules.tests_by_file(found, file))


def test_every_patch_has_one_and_no_exception_is_stale():
    patches = [patch.name for found in by_module().values() for patch in found]
    assert len(patches) == len(set(patches)) == sum(isinstance(item.patch, Patch) for item in registry.load()[0])
    for place in ELSEWHERE:
        framework, _, bug = place.partition("/")
        assert (ROOT / "patches" / f"{place}.py").is_file()
        assert not (TESTS / framework / f"test_{bug}.py").exists()
