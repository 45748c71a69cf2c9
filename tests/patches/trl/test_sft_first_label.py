"""``trl-sft-first-label``: SFT on flattened batches has the gradient of its examples one by one, in float64.

sft_first_label_ranks.py trains TRL's own SFTTrainer with transformers' own code for FlashAttention.
"""

from __future__ import annotations

import os

import pytest

from rlhf_patches.patches.trl.sft_first_label import PATCH
from rlhf_patches.testing import PatchContract
from tests.harness import unpacked
from tests.harness.forkserver import TORCH, Level
from tests.harness.side_by_side import folder

RULE_COVERAGE = {
    "minimal scope": "test_what_was_right_is_the_same_bit_for_bit",
    "no side effects": "because labels of the batch that is being made get another value, in a new tensor",
    "backward compatible": ("test_what_was_right_is_the_same_bit_for_bit", "test_a_batch_keeps_what_was_right_in_it"),
    "no new blocking": "because it makes a batch from its examples; no lock, no collective",
    "unless `completion_only_loss=False`": "test_completions_are_affected_where_their_first_token_is_trained",
    "stay bit for bit": "test_what_was_right_is_the_same_bit_for_bit",
}
WORKER = "tests.patches.trl.sft_first_label_ranks"
WRONG = ("padding_free", "packing", "padding_free, pad_to_multiple_of")
SAME = ("padding_free, completions", "padded", "padding_free, sdpa")
#: Everything is in float64 except the loss, which transformers computes in float32. Errors are 6e-8.
TOLERANCE = 1e-6


class TestContract(PatchContract):
    patch = PATCH
    releases = ("trl==0.19.0", "trl==0.22.1", "trl==0.22.2", "trl==0.23.0", "trl==0.23.1", "trl==0.18.2")
    held = RULE_COVERAGE


@pytest.fixture
def trained(run_ranks):
    def run(version, *cases):
        folders = [unpacked.folders(f"trl=={version}"), str(folder("transformers-4.57"))]
        levels = (*TORCH, Level("tests.harness.loading:transformers_alone", os.pathsep.join(folders)))
        (found,) = run_ranks(WORKER, *cases, levels=levels, ranks=1)
        assert (found["version"], found["status"]) == (version, "applied")
        held, calls = found["reached"]["held"], found["reached"]["calls"]
        assert (held, calls) == (sum(case in WRONG for case in cases), len(cases))  # not padded ones, nor completions
        return found

    return run


def is_repaired(found, *cases):
    for case in cases:
        for state in ("before", "reverted"):
            assert found[state][case]["error"] > 0.3
        assert found["after"][case]["error"] < TOLERANCE


def test_examples_do_not_end_with_the_next_one_s_first_token(trained):
    is_repaired(trained("0.23.0", *WRONG, *SAME), *WRONG)


def test_what_was_right_is_the_same_bit_for_bit(trained):
    found = trained("0.23.0", *WRONG, *SAME)
    for case in SAME:
        assert found["after"][case] == found["before"][case] == found["reverted"][case]
    assert found["before"]["padding_free, completions"]["error"] < TOLERANCE


def test_where_the_row_is_padded_examples_attended_to_each_other(trained):
    """0.23.0 pads the mask with zeros there. transformers then splits the row by the mask, not by positions."""
    found = {case: each["loss"] for case, each in trained("0.23.0", *WRONG, *SAME)["before"].items()}
    crossed, blind, apart = (
        found[case][0] for case in ("padding_free, pad_to_multiple_of", "padding_free, sdpa", "padding_free")
    )
    # Positions restart at each example in one case only; the loss of this model hardly depends on them.
    assert abs(crossed - blind) < 0.01 * abs(crossed - apart)


def test_a_batch_keeps_what_was_right_in_it(trained):
    """Labels that the user has shifted for a loss of their own, and the mask of ones, which users' collators read."""
    found = trained("0.23.0", *WRONG, *SAME)["batches"]
    for state in ("before", "after"):
        batch = found[state]
        assert batch["shifted"]["labels"] == [[4, 5, -100, 9, -100]], state
        assert batch["shifted, of one word"]["labels"] == [[4, 4, -100, 9, -100]], state
        assert batch["shifted"]["attention_mask"] == batch["copied"]["attention_mask"] == [[1] * 5], state
    assert found["before"]["copied"]["labels"] == [[3, 4, 5, 8, 9]]
    assert found["after"]["padded"] == {
        **found["before"]["padded"],
        "attention_mask": [[1] * 8],
        "labels": [[-100, 4, 5, -100, 9, -100, -100, -100]],
    }
    assert found["after"]["copied"]["labels"] == [[-100, 4, 5, -100, 9]]


def test_completions_are_affected_where_their_first_token_is_trained(trained):
    found = trained("0.23.0", *WRONG, *SAME)["batches"]
    for case in ("completions without a prompt", "prompts too"):
        assert found["before"][case]["labels"] == found["reverted"][case]["labels"] == [[3, 4, 5, 8, 9]]
        assert found["after"][case] == {**found["before"][case], "labels": [[-100, 4, 5, -100, 9]]}
    assert found["before"]["completions"]["labels"] == [[-100, 4, 5, -100, 9]]
    assert found["after"]["completions"] == found["before"]["completions"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("version", ["0.19.1", "0.22.1"])
def test_other_releases(trained, version):
    """0.22.1 gives transformers a mask of ones, and it changes nothing."""
    is_repaired(trained(version, "padding_free", "packing"), "padding_free", "packing")
