"""Order of SkyRL's loss outputs where micro-batches are packed by tokens, on its real workers."""

from __future__ import annotations

import pytest

from rlhf_patches.patches.skyrl.loss_outputs_packed import in_order_of_samples
from tests.harness.forkserver import SKYRL_WORKERS, skyrl

RULE_COVERAGE = {
    "minimal scope": "test_nothing_else_changes",
    "no side effects": (
        "because it makes a new list of what the workers have collected, and reads the iterator's indices"
    ),
    "backward compatible": "test_a_sample_without_an_output_leaves_them_as_they_come",
    "no new blocking": "test_a_sample_without_an_output_leaves_them_as_they_come",
    "the order stays as released": "test_a_sample_without_an_output_leaves_them_as_they_come",
    "the outputs are unchanged": "test_nothing_else_changes",
}
SAMPLES = 12
# Logits are float32 in the worker: some 1e-7 of log-probabilities of size 10; another sample's differ by 0.1 and more.
ROUNDING = 2e-5
CASES = [f"{backend}, {loss}" for backend in ("fsdp", "megatron") for loss in ("cross_entropy", "policy")]


@pytest.fixture(scope="module")
def report(skyrl_ranks):
    """What the controller has; it is the same on both ranks."""
    found, other = skyrl_ranks("0.3", worker="loss_outputs_packed_ranks", levels=(*skyrl("0.3"), SKYRL_WORKERS))
    assert found["status"] == "applied"
    assert found == other
    return found


def of(report, state, case, kind="packed"):
    backend, loss = case.split(", ")
    return report[state][f"{backend}, {kind}, {loss}"]


def wrong(found):
    """The samples whose log-probabilities are not their own."""
    return [
        sample
        for sample, expected in enumerate(found["expected"])
        if len(found["log_probs"][sample]) != len(expected)
        or max(abs(a - b) for a, b in zip(found["log_probs"][sample], expected, strict=True)) > ROUNDING
    ]


@pytest.mark.parametrize("case", CASES)
def test_each_sample_has_its_own_outputs_and_padding_has_none(report, case):
    after = of(report, "after", case)
    assert len(after["log_probs"]) == SAMPLES
    assert wrong(after) == []
    if "cross_entropy" in case:  # all actions are in the loss here
        assert after["losses"] == [[-value for value in sample] for sample in after["log_probs"]]


@pytest.mark.parametrize("case", CASES)
def test_as_released_they_are_other_samples(report, case):
    before = of(report, "before", case)
    # One rank has two micro-batches and two of padding, the other four; Megatron fills each up to three or two.
    assert len(before["log_probs"]) == (SAMPLES + 2 if case.startswith("fsdp") else 4 * 3 + 4 * 2)
    assert len(wrong(before)) >= SAMPLES - 3
    assert of(report, "reverted", case)["log_probs"] == before["log_probs"]


@pytest.mark.parametrize("case", CASES)
def test_nothing_else_changes(report, case):
    """Metrics and gradients with packing; outputs, too, without."""
    before, after = of(report, "before", case), of(report, "after", case)
    assert before["metrics"] == after["metrics"]
    assert before["gradients"] == after["gradients"]
    assert all(after["gradients"])
    plain = of(report, "before", case, "plain")
    assert of(report, "after", case, "plain") == plain
    assert wrong(plain) == []


def test_a_sample_without_an_output_leaves_them_as_they_come(caplog):
    """On one rank, say: an error would leave the others waiting for it."""
    iterator = type("Iterator", (), {"_microbatches": [[2, 0], [1]]})()
    assert in_order_of_samples([["c", "a", "filled up"], ["b"], ["padding"]], iterator) == ["a", "b", "c"]
    assert in_order_of_samples([[], [], []], iterator) == in_order_of_samples([], iterator) == []
    assert in_order_of_samples([["c"], ["b"]], None) == ["c", "b"]
    assert caplog.messages == []
    for _ in range(2):
        assert in_order_of_samples([["c"], ["b"]], iterator) == ["c", "b"]
    (said,) = caplog.messages
    assert "outputs of 2 samples, expected 3: micro-batches of [2, 1] samples have [1, 1] outputs" in said
