"""peft-layers-to-transform: which modules of real mixtures the real PEFT adapts (layers_to_transform_ranks.py)."""

from __future__ import annotations

import pytest

from rlhf_patches.patches.peft.proofs import layers_to_transform_ranks as ranks
from tests.harness.forkserver import beside

RULE_COVERAGE = {
    "minimal scope": "test_what_was_right_is_the_same",
    "no side effects": "because it is another regular expression; nothing is read or written",
    "backward compatible": "test_what_was_right_is_the_same",
    "no new blocking": "because it matches one name; no lock, no collective",
    "Names without experts keep the number": "test_what_was_right_is_the_same",
    "Load it with the patch off": "test_an_adapter_that_was_trained_with_the_bug_is_told_apart",
}


@pytest.fixture(scope="module")
def found(run_ranks):
    (report,) = run_ranks(ranks.__name__, levels=beside("peft-0.18", "peft", "transformers-4.57"), ranks=1)
    assert report["status"] == "applied"
    return report


@pytest.mark.parametrize("case", ranks.WRONG)
def test_the_number_of_an_expert_counted_and_that_of_the_layer_does(found, case):
    for state in ("before", "reverted"):
        assert found[state][case]["adapted"] != found[state][case]["right"]
        assert any(".experts." in name for name in found[state][case]["adapted"])
    assert found["after"][case]["adapted"] == found["after"][case]["right"]


@pytest.mark.parametrize("case", [case for case in ranks.CASES if case not in ranks.WRONG])
def test_what_was_right_is_the_same(found, case):
    assert found["before"][case]["adapted"] == found["before"][case]["right"]
    assert found["after"][case] == found["before"][case]


def test_an_adapter_that_was_trained_with_the_bug_is_told_apart(found):
    """Of the weights of one expert in three layers, those of two layers have no place any more."""
    assert found["before"]["loaded"] == {"unexpected": 0}
    assert found["after"]["loaded"] == {"unexpected": 12}
