"""trl-vllm-nan-logprob: TRL's own GRPO trainer (1.5.1) on vLLM's answers, of which some tokens have no log-probability.

vllm_nan_logprob_ranks.py has the answers, and the reference in float64. The model is float32: log-probabilities near
4.6, so a ratio is good to some 1e-6, and so are the loss and the gradients (seen: 6e-7 of the largest gradient).
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from rlhf_patches.patches.trl import vllm_nan_logprob
from rlhf_patches.patches.trl.proofs import vllm_nan_logprob_cases as cases
from tests.harness.forkserver import TORCH, TRL, Level
from tests.harness.logs import diagnosed
from tests.harness.side_by_side import folder

RULE_COVERAGE = {
    "minimal scope": (
        "test_lists_without_none_are_the_very_objects_of_vllm",
        "test_where_all_tokens_have_one_nothing_changes",
    ),
    "no side effects": "test_lists_without_none_are_the_very_objects_of_vllm",
    "backward compatible": (
        "test_lists_without_none_are_the_very_objects_of_vllm",
        "test_where_all_tokens_have_one_nothing_changes",
    ),
    "no new blocking": "because it computes on one rank's tensors; no lock, no collective",
    "Not repaired": "because no function of these is a target",
    "bit for bit identical": "test_where_all_tokens_have_one_nothing_changes",
}
NAME = "trl-vllm-nan-logprob"
WORKER = "rlhf_patches.patches.trl.proofs.vllm_nan_logprob_ranks"
UNSCORED = [name for name in cases.UNSCORED if name != "none"]
NOT_CORRECTED = "not corrected"


@pytest.fixture(scope="module")
def report(run_ranks):
    levels = (*TORCH, Level("tests.harness.loading:trl", str(folder("trl-1.5"))))
    (found,) = run_ranks(WORKER, levels=levels, ranks=1)
    return found


def check(found):
    """Ratios, loss and gradients are those of the reference."""
    for ratios, expected in zip(found["ratios"], found["expected"]["ratios"], strict=True):
        assert ratios == pytest.approx(expected, rel=2e-6)
    assert found["loss"] == pytest.approx(found["expected"]["loss"], abs=1e-6)
    assert found["distance of gradients"] <= 2e-6


def test_the_release_is_affected(report):
    assert (report["version"], report["status"]) == ("1.5.1", "applied")


@pytest.mark.parametrize("state", ["before", "reverted"])
def test_unpatched_the_batch_cannot_be_made(report, state):
    for case in (*(f"{mode}, {name}" for mode, name in itertools.product(cases.MODES, UNSCORED)), NOT_CORRECTED):
        assert report[state][case]["failed"] == "Could not infer dtype of NoneType"


@pytest.mark.parametrize("mode", cases.MODES)
@pytest.mark.parametrize("unscored", cases.UNSCORED)
def test_a_token_without_log_probability_has_a_ratio_of_one(report, mode, unscored):
    found = report["after"][f"{mode}, {unscored}"]
    check(found)
    if mode.startswith("token"):
        assert all(found["ratios"][row][column] == 1 for row, column in cases.UNSCORED[unscored])


@pytest.mark.parametrize("unscored", cases.UNSCORED)
def test_in_the_metric_it_counts_as_no_difference(report, unscored):
    differences = [
        0.0 if (row, column) in cases.UNSCORED[unscored] else abs(one)
        for row, each in enumerate(cases.DIFFERENCES)
        for column, one in enumerate(each)
    ]
    metrics = report["after"][f"{cases.MODES[0]}, {unscored}"]["metrics"]
    name = "sampling/sampling_logp_difference"
    assert metrics[f"{name}/mean"] == pytest.approx(sum(differences) / len(differences), rel=1e-5)
    assert metrics[f"{name}/max"] == pytest.approx(max(differences), rel=1e-5)


def test_where_the_ratio_is_not_corrected_no_sequence_is_masked_for_it(report):
    """The advantages are equal and opposite: a sequence that a NaN had masked would leave the other's, 0.35."""
    assert report["after"][NOT_CORRECTED]["loss"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("mode", cases.MODES)
def test_where_all_tokens_have_one_nothing_changes(report, mode):
    before, after, reverted = (report[state][f"{mode}, none"] for state in ("before", "after", "reverted"))
    assert before == after == reverted


def test_its_traceback_is_diagnosed(report):
    log = report["before"][f"{cases.MODES[0]}, one"]["traceback"]
    assert diagnosed(log) == [(NAME, True)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", cases.MODES)
@pytest.mark.parametrize("unscored", cases.UNSCORED)
def test_the_same_as_a_release_without_the_bug(report, run_ranks, mode, unscored):
    """1.14.2. Its metric leaves such tokens out."""
    (theirs,) = run_ranks(WORKER, "--released", levels=TRL, ranks=1)
    found, ours = (one[f"{mode}, {unscored}"] for one in (theirs["released"], report["after"]))
    check(found)
    assert (found["ratios"], found["loss"]) == (ours["ratios"], ours["loss"])


def test_lists_without_none_are_the_very_objects_of_vllm():
    for given in (None, [], [[]], [[-0.5, -1.0], [-2.0]], [np.array([-0.5]), torch.tensor([-1.0])]):
        assert vllm_nan_logprob.with_nan(given) is given
    found = vllm_nan_logprob.with_nan([[None, -1.0], [-2.0]])
    assert math.isnan(found[0][0])
    assert found[0][1:] + found[1] == [-1.0, -2.0]
