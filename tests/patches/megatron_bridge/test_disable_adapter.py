"""megatron-bridge-disable-adapter: contexts of Megatron-Bridge's own LoRA, against the base model in float64."""

from __future__ import annotations

import pytest

from tests.harness.forkserver import trainer

WORKER = "tests.patches.megatron_bridge.disable_adapter_ranks"
#: float32 against float64, of the largest value; seen: 3e-7. An adapter shows as more than 1.
TOLERANCE = 1e-5
RULE_COVERAGE = {
    "minimal scope": "test_with_it_the_outer_context_has_the_base_model_to_its_end",
    "no side effects": "test_what_else_the_release_takes",  # within `untouched`
    "backward compatible": "test_what_else_the_release_takes",
    "no new blocking": "because it reads flags and switches layers off; no lock, no collective",
    "on, as released": "test_what_was_off_before_stays_off",
}
INNER = ("inner", "inner raises", "two chunks")


@pytest.fixture(scope="module")
def found(run_ranks):
    (report,) = run_ranks(WORKER, levels=trainer("megatron_bridge"), ranks=1)
    assert report["status"] == "applied"
    return report


@pytest.mark.parametrize("trial", INNER)
def test_without_it_the_adapter_is_on_after_an_inner_context(found, trial):
    for state in ("before", "reverted"):
        assert found[state][trial]["outer"] < TOLERANCE
        assert found[state][trial]["outer, after inner"] > 0.5


@pytest.mark.parametrize("trial", INNER)
def test_with_it_the_outer_context_has_the_base_model_to_its_end(found, trial):
    observed = found["after"][trial]
    assert observed["outer"] == observed["outer, after inner"] < TOLERANCE
    assert observed["after"] == observed["before"] > 0.5, "and the policy afterwards"


def test_what_was_off_before_stays_off(found):
    assert found["before"]["off before"]["after"] > 0.5
    assert found["after"]["off before"]["after"] < TOLERANCE
    assert found["before"]["one layer off"] == found["reverted"]["one layer off"] == [True, True]
    assert found["after"]["one layer off"] == [False, True]


def test_a_run_is_told_whether_it_was_affected(found):
    """In the inner contexts, and where an adapter was off before; never in the outer ones, nor without a layer off."""
    reached = found["reached"]
    affected = len(INNER) + len(("off before", "one layer off", "what else: a dictionary"))
    assert reached["calls"] == reached["asked"] == affected + len(INNER) + len(("what else: a user's layer",))
    assert reached["held"] == affected


def test_what_else_the_release_takes(found):
    """A dictionary of models, one of which is off; and a layer that cannot be switched."""
    for state in ("before", "after", "reverted"):
        observed = found[state]["what else"]
        assert observed["within"] < TOLERANCE
        on, off = observed["after"]
        assert on > 0.5
        assert (off < TOLERANCE) == (state == "after")
