"""transformers-packed-state-space and -short-convolution: packed rows against their documents alone in float64."""

from __future__ import annotations

import importlib

import pytest

from tests.harness.by_case import States, exhaustive_but
from tests.harness.forkserver import beside

NAME = "transformers-packed-state-space"
WORKER = "rlhf_patches.patches.transformers.proofs.packed_linear_attention_ranks"
CONVOLUTIONS = "transformers-packed-short-convolution"
PATCHES = dict.fromkeys(("Bamba", "FalconH1", "NemotronH"), NAME) | dict.fromkeys(("Lfm2", "Lfm2Moe"), CONVOLUTIONS)
WRONG = ("packed", "2 rows", "long", "bfloat16", "checkpointed", "reentrant")
LEFT = ("a mask", "not packed", "no positions", "other jumps", "a cache", "generated")
FEW = {
    NAME: (
        *(f"{model}, {how}" for model in PATCHES if PATCHES[model] == NAME for how in ("packed", "a cache")),
        *(f"Bamba, {how}" for how in LEFT),
    ),
    CONVOLUTIONS: ("Lfm2, packed", "Lfm2Moe, packed", *(f"Lfm2, {how}" for how in LEFT)),
}
"""`make test` has these, one run for each patch; test_packed_linear_attention.py has the others for these functions."""
RULE_COVERAGE = {
    "minimal scope": "test_all_other_calls_stay_bit_for_bit",
    "no side effects": "test_the_model_is_only_read",
    "backward compatible": "test_all_other_calls_stay_bit_for_bit",
    "no new blocking": "because a layer makes the calls of modules that it made: no lock, no collective",
    "bit for bit": "test_all_other_calls_stay_bit_for_bit",
}
#: float32 against float64, over 70 steps of the recurrence; bfloat16 has 8 bits.
TOLERANCE = {"bfloat16": 0.1}


@pytest.fixture(scope="module")
def seen(run_ranks):
    def run(case):
        patch = PATCHES[case.partition(",")[0]]
        together = FEW[patch] if case in FEW[patch] else (case,)
        (report,) = run_ranks(WORKER, *together, "--patch", patch, levels=beside(None, "trainer"), ranks=1)
        assert report["status"] == "applied"
        return report

    return States(run)


def of(hows):
    cases = [f"{model}, {how}" for how in hows for model in PATCHES]
    few = {case for each in FEW.values() for case in each}
    return pytest.mark.parametrize("case", exhaustive_but(cases, *(case for case in cases if case in few)))


@of(WRONG)
def test_without_it_other_documents_come_in(seen, case):
    assert seen["before"][case]["gradient"] > 0.1


@of(WRONG)
def test_with_it_a_document_is_as_it_is_alone(seen, case):
    found = seen["after"][case]
    assert found["parameters"] > 10
    assert found["gradient"] < TOLERANCE.get(case.split(", ")[1], 1e-4)


@of(LEFT)
def test_all_other_calls_stay_bit_for_bit(seen, case):
    assert seen["after"][case] == seen["before"][case]


@of(LEFT[:-1])
def test_the_model_is_only_read(seen, case):
    assert seen["after"][case]["touched"] == ""


@of((*WRONG, *LEFT))
def test_after_revert_it_is_as_released(seen, case):
    assert seen["reverted"][case] == seen["before"][case]


@pytest.mark.parametrize("given", [{}, {"seq_idx": True}], ids=["positions", "seq_idx"])
def test_the_fused_kernel_gets_one_document_unless_it_knows_them(apply_patch, monkeypatch, given):
    """In place of the kernel, which needs CUDA: a running sum of each call's tokens."""
    torch, ranks = pytest.importorskip("torch"), pytest.importorskip(WORKER)
    modeling = importlib.import_module("transformers.models.bamba.modeling_bamba")
    lengths = []
    text = "def kernel(states, *_, **keywords):\n    noted(states, keywords)\n    return states[..., :16].cumsum(1)\n"

    def noted(states, keywords):
        lengths.append(states.shape[1])
        assert ("seq_idx" in keywords) == bool(given)

    package = {"__name__": "mamba_ssm.ops.triton.ssd_combined", "noted": noted}
    exec(text, package)

    def logits():
        monkeypatch.setattr(modeling, "mamba2_split_conv1d_scan_combined", package["kernel"])
        packed = ranks.rows.packed(1)
        more = {name: torch.zeros(1, 21, dtype=torch.int32) for name in given}
        with torch.no_grad():
            return ranks.made("Bamba").train()(packed["ids"], position_ids=packed["position_ids"], **more).logits

    released = logits()
    apply_patch(NAME)
    found = logits()
    assert lengths == ([21, 21] if given else [21, *ranks.rows.DOCUMENTS])
    assert torch.equal(found, released) == bool(given)
    torch.testing.assert_close(found[:, :7], released[:, :7])
