"""transformers-packed-short-convolution: packed rows of tiny models, against their documents alone in float64."""

from __future__ import annotations

import pytest

from tests.harness.by_case import States, exhaustive_but
from tests.harness.forkserver import beside

NAME = "transformers-packed-short-convolution"
WORKER = "rlhf_patches.patches.transformers.proofs.packed_linear_attention_ranks"
MODELS = ("Lfm2", "Lfm2Moe")
WRONG = ("packed", "2 rows", "long", "bfloat16", "checkpointed", "reentrant")
LEFT = ("a mask", "not packed", "no positions", "other jumps", "a cache", "generated")
FEW = (*(f"{model}, {how}" for model in MODELS for how in ("packed",)), *(f"Lfm2, {how}" for how in LEFT))
"""`make test` has these, in one run; test_packed_linear_attention.py has the others for the same functions."""
RULE_COVERAGE = {
    "minimal scope": "test_all_other_calls_stay_bit_for_bit",
    "no side effects": "test_the_model_is_only_read",
    "backward compatible": "test_all_other_calls_stay_bit_for_bit",
    "no new blocking": "because a layer makes the one call of its convolution that it made: no lock, no collective",
    "bit for bit": "test_all_other_calls_stay_bit_for_bit",
}
#: float32 against float64; bfloat16 has 8 bits.
TOLERANCE = {"bfloat16": 0.1}


@pytest.fixture(scope="module")
def seen(run_ranks):
    def run(case):
        together = FEW if case in FEW else (case,)
        (report,) = run_ranks(WORKER, *together, "--patch", NAME, levels=beside(None, "trainer"), ranks=1)
        assert report["status"] == "applied"
        return report

    return States(run)


def of(hows):
    cases = [f"{model}, {how}" for how in hows for model in MODELS]
    return pytest.mark.parametrize("case", exhaustive_but(cases, *(case for case in cases if case in FEW)))


@of(WRONG)
def test_without_it_tokens_of_other_documents_come_in(seen, case):
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
