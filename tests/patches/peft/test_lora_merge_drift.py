"""peft-lora-merge-drift: adapters merged and unmerged by the real PEFT, and by TRL's own weight synchronization.

The yardsticks: the base weights before, bit for bit; for merged weights, the sum in float64; and where the patch leaves
it to PEFT, what PEFT does without it, bit for bit.
"""

from __future__ import annotations

import pytest

import rlhf_patches
from tests.harness.forkserver import peft

RULE_COVERAGE = {
    "minimal scope": ("test_merged_for_good_nothing_is_copied", "test_where_it_is_not_certain_PEFT_unmerges_as_ever"),
    "no side effects": "test_the_model_is_untouched_but_for_the_merged_weights",
    "backward compatible": (
        "test_where_it_is_not_certain_PEFT_unmerges_as_ever",
        "test_after_a_merge_that_failed_the_next_is_undone_exactly",
        "test_without_memory_for_a_copy_PEFT_unmerges",
        "test_by_trl",
    ),
    "known": "test_merged_for_good_nothing_is_copied",
    "no new blocking": "because a copy that fails leaves it to PEFT; no lock, no collective",
    "base weights in bf16 or fp16 are the same, bit for bit": "test_with_it_they_are_the_same_bit_for_bit",
    "must be the present weight, bit for bit": "test_where_it_is_not_certain_PEFT_unmerges_as_ever",
    "PEFT's own `unmerge` runs in these cases": "test_where_it_is_not_certain_PEFT_unmerges_as_ever",
    "`merge_and_unload` makes no copy": "test_merged_for_good_nothing_is_copied",
    "The merged weights, which vLLM gets, are unchanged": "test_merged_weights_are_as_right_as_before",
}
NAME = "peft-lora-merge-drift"
WORKER = "tests.patches.peft.lora_merge_drift_ranks"
EXACT = ("bfloat16", "float16", "safe merge", "two adapters", "transposed")
#: Relative to what is added: the product is rounded at most once, and the sum once, each by half a unit at most.
ROUNDING = {"bfloat16": 2 * 2**-8, "float16": 2 * 2**-11, "safe merge": 2 * 2**-8}
LEFT_ALONE = ("changed: weight", "changed: adapter", "changed: scaling", "changed: dtype", "float32")
SINCE_0_16 = ("DoRA", "bias", "shard")


@pytest.fixture(
    scope="module",
    params=[None, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("peft-0.7", "peft-0.18"))],
    ids=str,
)
def found(request, run_ranks):
    (report,) = run_ranks(WORKER, levels=peft(request.param), ranks=1)
    assert report["status"] == "applied"
    if request.param:
        assert report["version"] == f"{request.param.removeprefix('peft-')}.0"
    return report


@pytest.mark.parametrize("case", EXACT)
def test_without_it_100_cycles_move_the_base_weights(found, case):
    for state in ("before", "reverted"):
        assert found[state][case]["moved"] > (2e-4 if case == "float16" else 1.5e-3), "a quarter of what was seen"
        assert set(found[state][case]["ways"].values()) == {0}, "the patch has no part in it"


@pytest.mark.parametrize("case", EXACT)
def test_with_it_they_are_the_same_bit_for_bit(found, case):
    observed = found["after"][case]
    assert observed["same"]
    assert observed["ways"] == {"unmerged exactly": 200, "unmerged by PEFT": 0}
    assert found["report"]["unmerged exactly"] >= 200 * len(EXACT)


@pytest.mark.parametrize("case", ROUNDING)
def test_merged_weights_are_as_right_as_before(found, case):
    errors = [found[state][case]["merged, off float64 by"] for state in ("before", "after")]
    assert errors[0] == errors[1] < ROUNDING[case]
    assert found["after"][case]["merged"] == found["before"][case]["merged"], "bit for bit"


@pytest.mark.parametrize("case", [*LEFT_ALONE, *SINCE_0_16, "copied while merged"])
def test_where_it_is_not_certain_PEFT_unmerges_as_ever(found, case):
    if case in SINCE_0_16 and case not in found["after"]:
        pytest.skip("this release does not have it")
    assert found["after"][case]["digest"] == found["before"][case]["digest"]
    assert found["after"][case]["ways"] == {"unmerged exactly": 0, "unmerged by PEFT": 2}


def test_merged_for_good_nothing_is_copied(found):
    """By the operations that torch is asked for: they are PEFT's alone."""
    assert found["after"]["merged for good"] == found["before"]["merged for good"]
    assert found["after"]["merged for good"]["kept"] == 0
    assert len(found["after"]["merged for good"]["operations"]) > 4


def test_after_a_merge_that_failed_the_next_is_undone_exactly(found):
    assert "NaNs detected" in found["after"]["broken"]["raised"] == found["before"]["broken"]["raised"]
    assert not found["before"]["broken"]["same"]
    assert found["after"]["broken"]["same"]


def test_without_memory_for_a_copy_PEFT_unmerges(found):
    """On the host when it is merged, on the device when it is unmerged."""
    for when in ("merging", "unmerging"):
        observed = found["after"][f"no memory, {when}"]
        assert observed["digest"] == found["before"][f"no memory, {when}"]["digest"]
        assert observed["ways"] == {"unmerged exactly": 0, "unmerged by PEFT": 2}


def test_the_model_is_untouched_but_for_the_merged_weights(found):
    for state in ("before", "after", "reverted"):
        assert found[state]["touched"] is None


def test_by_trl(found):
    """``VLLMGeneration._iter_named_params``, whose weights are the merged ones."""
    if "by TRL" not in found["after"]:
        pytest.skip("TRL does not work with this release")
    for state, moved in (("before", True), ("after", False), ("reverted", True)):
        observed = found[state]["by TRL"]
        assert observed["sent another weight"]
        assert observed["sent"] == sorted(
            f"{name}.{part}" for name in ("up", "down", "head") for part in ("weight", "bias")
        )
        assert observed["same"] is not moved
    assert found["after"]["by TRL"]["ways"] == {"unmerged exactly": 200, "unmerged by PEFT": 0}


def test_a_run_meets_the_bug_where_a_layer_is_unmerged_exactly_and_not_elsewhere(apply_patch):
    """Not in `merge_and_unload`, which nobody unmerges, and nothing is told of what is left to PEFT."""
    peft = pytest.importorskip("peft")
    torch = pytest.importorskip("torch")

    def reached(dtype=torch.bfloat16, unload=False, **options):
        before = rlhf_patches.report()[NAME].reached
        config = peft.LoraConfig(target_modules=["0"], init_lora_weights=False, **options)
        model = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(8, 8)).to(dtype), config)
        if unload:
            model.merge_and_unload()
        else:
            model.merge_adapter()
            model.unmerge_adapter()
        after = rlhf_patches.report()[NAME].reached
        return [getattr(after, name) - getattr(before, name) for name in ("asked", "held")]

    apply_patch(NAME)
    assert reached(unload=True) == [0, 0]
    assert reached(use_dora=True) == [0, 0]
    assert reached(torch.float32) == [1, 0]
    assert reached() == [1, 1]
