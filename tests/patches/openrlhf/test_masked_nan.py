"""OpenRLHF's policy loss where masked and filtered tokens hold NaN or infinities (masked_nan_ranks.py)."""

from __future__ import annotations

import math
import statistics

import pytest

from rlhf_patches.patches.openrlhf.masked_nan import selected
from tests.harness.forkserver import beside

LOW, HIGH, DUAL, CLIP = 0.5, 5.0, 1.5, 0.2
OBJECTIVES = ["ppo", "dual", "gspo", "tis", "icepop", "seq-mask-tis"]
FILTERED = ["icepop, overflow", "seq-mask-tis, overflow"]
ROUNDING = 1e-6
"""A dozen float32 numbers of size 1 and less."""


RULE_COVERAGE = {
    "minimal scope": "test_without_a_mask_everything_counts",
    "no side effects": "test_its_inputs_are_left_as_they_are",
    "backward compatible": (
        "test_what_is_trained_has_the_same_bits_in_every_type",
        "test_the_divergence_in_half_precision",
        "test_a_nan_of_vllm_is_filtered_out_where_there_is_a_filter",
    ),
    "no new blocking": "because it selects within one rank's tensors: no lock, no collective, and nothing that raises",
    "of trained tokens are bitwise identical": (
        "test_what_is_trained_has_the_same_bits_in_every_type",
        "test_loss_and_gradient_are_those_of_the_formula",
    ),
    "The patch does not change": "test_without_a_mask_everything_counts",
    "or `advantages` stays a NaN": "test_a_nan_in_what_is_trained_on_is_not_hidden",
    "A NaN in `rollout_log_probs` stays a NaN": "test_a_nan_of_vllm_is_filtered_out_where_there_is_a_filter",
}


@pytest.fixture(scope="module", params=["0.10.2", "0.11.2"])
def report(run_ranks, request):
    """Losses, gradients and metrics as released, with the patch, and after a revert."""
    worker = "rlhf_patches.patches.openrlhf.proofs.masked_nan_ranks"
    (found,) = run_ranks(worker, levels=beside(f"openrlhf-{request.param}", "openrlhf"), ranks=1)
    assert (found["version"], found["status"]) == (request.param, "applied")
    return found


def weights(objective, old, rollout, mask):
    """Of one sequence; 1 without a correction."""
    found = [math.exp(min(a - b, 700.0)) for a, b in zip(old, rollout, strict=True)]
    if objective == "tis":
        return [min(max(weight, LOW), HIGH) for weight in found]
    if objective == "icepop":
        return [weight if LOW <= weight <= HIGH else 0.0 for weight in found]
    if objective == "seq-mask-tis":
        mean = statistics.fmean(a - b for a, b, kept in zip(old, rollout, mask, strict=True) if kept)
        return [weight if math.log(LOW) <= mean <= math.log(HIGH) else 0.0 for weight in found]
    return [1.0] * len(found)


def formula(objective, batch, log_probs):
    """The objective of the papers that the patch's page names, over the tokens that count."""
    losses = []
    for row, mask in enumerate(batch["action_mask"]):
        old, advantages = batch["old_log_probs"][row], batch["advantages"][row]
        ratios = [math.exp(a - b) for a, b in zip(log_probs[row], old, strict=True)]
        if objective == "gspo":
            mean = statistics.fmean(a - b for a, b, kept in zip(log_probs[row], old, mask, strict=True) if kept)
            ratios = [math.exp(mean)] * len(mask)
        weight = weights(objective, old, batch["rollout_log_probs"][row], mask)
        tokens = []
        for t in (t for t, kept in enumerate(mask) if kept):
            clipped = min(max(ratios[t], 1 - CLIP), 1 + CLIP)
            value = min(ratios[t] * advantages[t], clipped * advantages[t])
            if objective == "dual" and advantages[t] < 0:
                value = max(value, DUAL * advantages[t])
            tokens.append(-weight[t] * value)
        losses.append(tokens)
    if objective == "gspo":
        return statistics.fmean(map(statistics.fmean, losses))
    return statistics.fmean(loss for tokens in losses for loss in tokens)


def gradient(objective, batch):
    """By central differences in float64: 1e-10 from exact, as no ratio is that near to where it is clipped."""
    found = []
    for row, mask in enumerate(batch["action_mask"]):
        found.append([])
        for t in range(len(mask)):
            moved = []
            for step in (1e-5, -1e-5):
                log_probs = [list(values) for values in batch["log_probs"]]
                log_probs[row][t] += step
                moved.append(formula(objective, batch, log_probs))
            found[-1].append((moved[0] - moved[1]) / 2e-5)
    return found


def is_nan(found):
    return found["loss"] == "nan" and any("nan" in row for row in found["gradient"])


@pytest.mark.parametrize("masked", ["nan", "inf"])
@pytest.mark.parametrize("case", [*OBJECTIVES, "tis, overflow", *FILTERED])
def test_loss_and_gradient_are_those_of_the_formula(report, case, masked):
    batch, objective = dict(report["after"]["batch"]), case.partition(",")[0]
    if "overflow" not in case:
        batch["rollout_log_probs"] = report["after"]["plain rollout"]
    found = report["after"][f"{case}, {masked}"]
    assert found["loss"] == pytest.approx(formula(objective, batch, batch["log_probs"]), abs=ROUNDING)
    for row, wanted in zip(found["gradient"], gradient(objective, batch), strict=True):
        assert row == pytest.approx(wanted, abs=ROUNDING)
    if "overflow" not in case or case.startswith("tis"):
        # What is trained has the numbers that it has as released where nothing is wrong, bit for bit.
        assert found == report["before"][f"{case}, zero"]


@pytest.mark.parametrize("case", OBJECTIVES)
def test_as_released_what_is_masked_makes_it_nan(report, case):
    """The gradient of a token's ratio is cut off where that is out of bounds from 0.10.3 on, and NaN before."""
    before, after = report["before"][f"{case}, nan"], report["after"][f"{case}, nan"]
    assert before["loss"] == "nan"
    assert "nan" in before["metrics"]
    assert "nan" not in after["metrics"]
    of_the_sequence = case in ("gspo", "seq-mask-tis")
    assert (before["gradient"] != after["gradient"]) is (report["version"] == "0.10.2" or of_the_sequence)
    assert is_nan(before) is (report["version"] == "0.10.2" or case == "gspo")
    assert report["reverted"] == report["before"]


@pytest.mark.parametrize("case", FILTERED)
def test_as_released_before_0_11_1_what_is_filtered_makes_it_nan(report, case):
    found = report["before"][f"{case}, zero"]
    assert is_nan(found) if report["version"] == "0.10.2" else found == report["after"][f"{case}, zero"]


@pytest.mark.parametrize("divergence", ["binary_kl", "tv"])
def test_the_divergence_of_a_sequence_is_of_its_own_tokens(report, divergence):
    if report["version"] != "0.11.2":
        assert f"{divergence}, nan" not in report["before"]
        return
    after = report["after"]
    assert after[f"{divergence}, nan"] == after[f"{divergence}, inf"] == report["before"][f"{divergence}, zero"]
    assert report["before"][f"{divergence}, nan"]["gradient"] == [[0.0] * 5] * 3, "every sequence is dropped"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("level", ["token", "seq"])
@pytest.mark.parametrize("divergence", ["binary_kl", "tv"])
def test_the_divergence_in_half_precision(report, divergence, level, dtype):
    """1 - 1e-6 is 1 there: of p = q = 1 the binary KL would be NaN, and drop every sequence with padding."""
    case = f"{divergence}, {level}, {dtype}"
    if report["version"] != "0.11.2":
        assert f"{case}, nan" not in report["before"]
        return
    kept = report["before"][f"{case}, harmless"]
    assert all(map(any, kept["gradient"])), "no sequence is filtered out"
    for masked in ("harmless", "zero", "nan", "inf"):
        assert report["after"][f"{case}, {masked}"] == kept
    dropped = {"loss": 0.0, "gradient": [[0.0] * 5] * 3}
    if (divergence, level) == ("binary_kl", "seq"):
        assert report["before"][f"{case}, zero"] == {**report["before"][f"{case}, zero"], **dropped}


@pytest.mark.parametrize("case", OBJECTIVES)
def test_a_nan_of_vllm_is_filtered_out_where_there_is_a_filter(report, case):
    """As 0.11.2 has it; before, 0 times NaN was NaN."""
    before, after = (
        report["before"][f"{case}, trained on, rollout_log_probs"],
        report["after"][f"{case}, trained on, rollout_log_probs"],
    )
    if case == "tis":
        assert before["loss"] == after["loss"] == "nan"
    else:
        assert all(isinstance(one, float) for row in [[after["loss"]], *after["gradient"]] for one in row)
    if report["version"] == "0.11.2" or case not in ("icepop", "seq-mask-tis"):
        assert before == after
    else:
        assert before["loss"] == "nan"


@pytest.mark.parametrize("place", ["old_log_probs", "log_probs", "advantages"])
@pytest.mark.parametrize("case", OBJECTIVES)
def test_a_nan_in_what_is_trained_on_is_not_hidden(report, case, place):
    assert report["after"][f"{case}, trained on, {place}"]["loss"] == "nan"


def test_what_is_trained_has_the_same_bits_in_every_type(report):
    """With half precision, float64, masks of booleans, integers and floats, and no mask at all."""
    assert len(report["after"]["types"]) > 90
    assert report["after"]["types"] == report["before"]["types"]


def test_its_inputs_are_left_as_they_are(report):
    assert report["after"]["inputs left alone"]


def test_without_a_mask_everything_counts():
    values = object()
    assert selected(None, values) is values
