"""In place fires where it matters: SkyRL's own training step around a real GPTModel on two tensor-parallel ranks.

logprob_backward_training_ranks.py runs the real `MegatronModelWrapper.forward_backward_mini_batch`, which goes
through megatron-core's `forward_backward_func`; logits are upcast by its `Float16Module`, or in fp32 from the start.
"""

from __future__ import annotations

import pytest

SOME = ("bf16", "bf16-entropy", "bf16-packed-entropy-chunked", "fp32")
"""Of eleven cases, which are run where none is named."""


@pytest.fixture(
    scope="module",
    params=[("0.3", *SOME), *(pytest.param((name,), marks=pytest.mark.exhaustive) for name in ("0.3", "0.2"))],
    ids=lambda param: f"{param[0]}-{len(param[1:]) or 11}",
)
def reports(skyrl_ranks, request):
    release, *cases = request.param
    reports = skyrl_ranks(release, *cases, worker="logprob_backward_training_ranks")
    assert {len(report["training"]) for report in reports} == {len(cases) or 11}
    return reports


def cases(reports):
    for report in reports:
        yield from report["training"].items()


def test_every_backward_is_in_place(reports):
    """Two micro-batches: packed and not, with and without the entropy loss, chunked and not."""
    for name, case in cases(reports):
        assert case["observed"] == [{}, {"backward in place": 2}], name


def test_every_gradient_is_as_before(reports):
    """In fp32 but for rounding. In bfloat16 the model's backward begins with a cast, and nothing is left of that."""
    for name, case in cases(reports):
        assert case["gradients_found"] > 20
        assert case["largest_deviation"] <= (2**-8 if name.startswith("bf16") else 2e-6), name
        assert case["losses"][1] == pytest.approx(case["losses"][0], rel=1e-5)
        assert case["entropies"][1] == pytest.approx(case["entropies"][0], rel=1e-5)


def test_log_probabilities_are_the_same_bit_for_bit(reports):
    for name, case in cases(reports):
        assert case["same_log_probs"], name
        assert case["same_inference"], name


def test_the_entropy_is_part_of_the_loss_where_it_should_be(reports):
    """Else the comparisons above would say nothing of its gradient."""
    found = reports[0]["training"]
    assert found["bf16-entropy"]["losses"] != found["bf16"]["losses"]


def test_fewer_collectives(reports):
    for name, case in cases(reports):
        before, after = case["all_reduces"]
        assert after < before, name
    assert len({case["all_reduces"][1] for _, case in cases(reports)}) == 1, "whatever the chunks"


def test_the_report_says_so(reports):
    for report in reports:
        (row,) = [row for row in report["report"] if row["name"] == "skyrl-logprob-backward"]
        assert row["observations"] == {"backward in place": 2}
        assert "backward in place: 2" in row["reason"]
