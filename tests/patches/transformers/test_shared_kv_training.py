"""transformers-shared-kv-training: tiny Gemma 3n without a cache, against a cached forward pass in float64.

The environment has no release in which Gemma 4 has the bug (5.5.0, 5.5.1): the proof's worker runs there by hand.
"""

from __future__ import annotations

import pytest

from rlhf_patches.patches.transformers.shared_kv_training import PATCH
from tests.harness.by_case import exhaustive_but
from tests.harness.forkserver import beside

PROOF = "rlhf_patches.patches.transformers.proofs.shared_kv_training_ranks"
WORKER = "tests.patches.transformers.shared_kv_training_own_ranks"
CHECKPOINTED = ("Gemma3n, checkpointing", "Gemma3n, reentrant")
WRONG = (
    "Gemma3n",
    *CHECKPOINTED,
    "training",
    "evaluation",
    "use_cache",
    "inherits",
    "wrapped",
    "cache and checkpointing",
)
LEFT = ("cache", "cache in training", "generated", "no sharing", "Qwen3")
OWN = ("own layer", "own attention", "own forward")
RULE_COVERAGE = {
    "minimal scope": "test_all_others_stay",
    "no side effects": "test_the_model_is_only_read",
    "backward compatible": ("test_all_others_stay", "test_code_of_ones_own_stays_and_that_is_said"),
    "known": "test_code_of_ones_own_stays_and_that_is_said",
    "no new blocking": "because it hands tensors of this rank on: no lock, no collective",
    "bit for bit": "test_all_others_stay",
}
#: float32 against float64.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def report(run_ranks):
    cases = (*WRONG, "Trainer", *LEFT, *OWN)
    (report,) = run_ranks(WORKER, *cases, levels=beside("transformers-4.57", "trainer"), ranks=1)
    assert report["version"].startswith("4.57")
    assert report["status"] == "applied"
    return report


@pytest.mark.parametrize("case", WRONG)
def test_without_it_later_layers_use_keys_and_values_of_their_own(report, case):
    assert report["before"][case]["gradient"] > 0.1
    assert report["before"][case].get("of others", 1) > 0.01


@pytest.mark.parametrize("case", WRONG)
def test_with_it_loss_and_gradient_are_those_with_a_cache(report, case):
    found = report["after"][case]
    assert found["parameters"] > 10
    assert found["gradient"] < TOLERANCE
    assert found.get("loss", 0) < TOLERANCE
    assert found.get("of others", 0) == 0


def test_by_trainer_the_first_loss_is_that_with_a_cache(report):
    assert report["before"]["Trainer"]["loss"] > 1e-3
    assert report["after"]["Trainer"]["loss"] < TOLERANCE


@pytest.mark.parametrize("case", LEFT)
def test_all_others_stay(report, case):
    assert report["after"][case] == report["before"][case]


@pytest.mark.parametrize("case", OWN)
def test_code_of_ones_own_stays_and_that_is_said(report, case):
    assert report["after"][case]["bits"] == report["before"][case]["bits"]
    assert len(report["after"][case]["heard"]) == 1


@pytest.mark.parametrize("case", ["training", "evaluation", "cache"])
def test_the_model_is_only_read(report, case):
    for state in ("before", "after"):
        assert report[state][case]["touched"] == ""


def test_after_revert_it_is_as_released(report):
    for case, found in report["reverted"].items():
        assert found == report["before"][case]


def test_reports_count_forwards_without_a_cache(report):
    reached = report["reached"]
    assert 0 < reached["held"] < reached["asked"] < reached["calls"]


@pytest.mark.parametrize("case", exhaustive_but(["compiled"]))
def test_it_compiles_whole(run_ranks, case):
    levels = beside("transformers-4.57", "trainer")
    (report,) = run_ranks(WORKER, case, levels=levels, ranks=1)
    assert report["before"][case]["gradient"] > 0.1
    assert report["after"][case]["gradient"] < TOLERANCE


def test_it_is_off_unless_asked_for_by_name():
    """DDP refuses weights without a gradient."""
    assert "find_unused_parameters" in PATCH.contested


def test_newer_releases_share_without_a_cache(run_ranks):
    """The reference is right where upstream's own repair is."""
    ranks = pytest.importorskip(PROOF)
    for family in ranks.FAMILIES:
        if not hasattr(ranks.transformers, f"{family}ForCausalLM"):
            pytest.skip(f"transformers has no {family}")
        assert ranks.trained(family)["gradient"] < 1e-4
        assert ranks.trained(family)["loss"] < TOLERANCE
