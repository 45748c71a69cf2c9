"""verl-critic-loss-scale on verl's real engine for critics, on two data-parallel ranks (critic_loss_scale_ranks.py).

Everything is in multiples of what float64 has for the global mini-batch.
"""

from __future__ import annotations

import json
import math

import pytest

from rlhf_patches.patches.verl.proofs import critic_loss_scale_ranks
from tests.harness.forkserver import Level, verl

WORKER = critic_loss_scale_ranks.__name__
CASES = critic_loss_scale_ranks.CASES
MICRO_BATCHES = {name: 4 // case.rows for name, case in CASES.items()}
LEFT_ALONE = [name for name, case in CASES.items() if not case.sized and case.mode != "token-mean"]
SEQUENCES = [name for name, case in CASES.items() if case.mode != "token-mean"]
RULE_COVERAGE = {
    "known": "test_a_loss_around_verls_is_left_alone",
    "minimal scope": (
        "test_a_loss_around_verls_is_left_alone",
        "test_without_the_number_that_is_needed_it_is_as_released",
        "test_the_old_critics_are_left_alone",
    ),
    "no side effects": "because it reads the micro-batch and makes a new dictionary of metrics",
    "backward compatible": ("test_without_the_number_that_is_needed_it_is_as_released", "test_the_metric_is_the_loss"),
    "no new blocking": "because it computes on one rank's tensors; no lock, no collective",
    "`critic/vf_loss` stays the average": "test_the_metric_is_the_loss",
    "no longer depends on the micro-batch size": "test_with_it_the_gradient_is_that_of_the_mini_batch",
    "a loss of your own": "test_a_loss_around_verls_is_left_alone",
    "does not change a custom trainer": (
        "test_without_the_number_that_is_needed_it_is_as_released",
        "test_the_old_critics_are_left_alone",
    ),
}
# float32 against float64: seen up to 2e-7. 0.7 computes in bfloat16 whatever it is told, with 2**-9 per operation: seen
# up to 0.02.
TOLERANCE = {"0.8": 1e-5, "0.7": 0.05, "0.7.0": 0.05}


@pytest.fixture(
    scope="module", params=["0.8", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("0.7", "0.7.0"))]
)
def release(request):
    return request.param


@pytest.fixture(scope="module")
def reports(run_ranks, release):
    levels = (*verl(release), Level("tests.harness.loading:verl_critic"))
    reports = run_ranks(WORKER, levels=levels, TORCHDYNAMO_DISABLE="1")
    for report in reports:
        assert (report["status"], report["version"][: len(release)]) == ("applied", release)
        if release == "0.7.0":  # where this mode is a sum, for the policy as well
            for state in ("before", "after"):
                del report[state]["cases"]["two, seq-mean-token-sum-norm"]
    return reports


@pytest.fixture
def tolerance(release):
    return TOLERANCE[release]


def found(reports, state):
    for report in reports:
        yield from report[state]["cases"].items()


def test_without_it_each_micro_batch_counts_as_a_mini_batch(reports, tolerance):
    """The average of the micro-batches' averages, times their number; with sequences of equal weight exactly that."""
    for name, case in found(reports, "before"):
        times = MICRO_BATCHES[name]
        if name in SEQUENCES:
            assert case["norm"] == pytest.approx(times, rel=tolerance)
            assert case["distance"] == pytest.approx(times - 1, rel=tolerance, abs=tolerance)
        elif name == "padding alone":
            assert math.isnan(case["loss"])
        else:
            assert case["norm"] > 0.9 * times
            assert case["loss"] > 0.9 * times


def test_with_it_the_gradient_is_that_of_the_mini_batch(reports, tolerance):
    for name, case in found(reports, "after"):
        if name not in LEFT_ALONE:
            assert case["distance"] < tolerance, name
            assert case["loss"] == pytest.approx(1, rel=tolerance), name


def test_the_metric_is_the_loss(reports, release, tolerance):
    """Or what it was, where verl has none that is summed, and where nobody need expect one."""
    for (name, case), (_, before) in zip(found(reports, "after"), found(reports, "before"), strict=True):
        assert before["numbers"]
        if release == "0.7.0" or not CASES[name].sized:
            assert json.dumps(case["numbers"]) == json.dumps(before["numbers"])  # NaN equals itself
        else:
            assert case["metric"] == pytest.approx(1, rel=tolerance), name


def test_without_the_number_that_is_needed_it_is_as_released(reports):
    for report in reports:
        for name in LEFT_ALONE:
            assert report["after"]["cases"][name] == report["before"]["cases"][name]
        for name in ("nothing set", "none"):
            assert report["after"][name] == report["before"][name]


def test_the_old_critics_are_left_alone(reports):
    """They call compute_value_loss themselves, after value_loss has been called here."""
    for report in reports:
        assert report["after"]["old critics"] == report["before"]["old critics"]


def test_a_loss_around_verls_is_left_alone(run_ranks, release):
    """Of somebody who has met the bug, and scales the result."""
    levels = (*verl(release), Level("tests.harness.loading:verl_critic"))
    (report,) = run_ranks("tests.patches.verl.critic_loss_scale_own_ranks", levels=levels, ranks=1)
    assert report["status"] == "applied"
    assert report["after"] == report["before"] == report["reverted"]
    assert report["reached"]["asked"] == 0 < report["reached"]["calls"]


def test_it_reports_the_micro_batches(reports, release):
    """Not one that is the whole mini-batch; unknown without a number that the repair needs."""
    several = sum(times for name, times in MICRO_BATCHES.items() if times > 1 and name not in LEFT_ALONE)
    if release == "0.7.0":  # where this mode is right
        several -= MICRO_BATCHES["two, seq-mean-token-sum-norm"]
    for report in reports:
        reached = report["reached"]
        assert reached["held"] == several + 1  # one of several ranks, whose numbers of tokens differ
        assert reached["calls"] == sum(MICRO_BATCHES.values()) + 5
        unknown = 2 * len(report["after"]["none"]) + sum(MICRO_BATCHES[name] for name in LEFT_ALONE)
        assert reached["asked"] == reached["calls"] - unknown
        assert report["after"]["one rank"] == report["before"]["one rank"]
        assert (reached["least"], reached["most"], reached["measure"]) == (2, 4, "micro-batches")


def test_reverted_it_is_verls_again(reports):
    for report in reports:
        before = {**report["before"], "cases": {"two": report["before"]["cases"]["two"]}}
        assert json.dumps(report["reverted"]) == json.dumps(before)
