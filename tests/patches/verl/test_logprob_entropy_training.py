"""verl's own training step around a real GPTModel: its newest engine, and the actors and engines before it.

logprob_entropy_training_ranks.py runs the real `forward_backward_batch`, with verl's loss, and so megatron-core's
`forward_backward_func`; logits are upcast by its `Float16Module`, or in fp32 from the start, and divided by the
temperature in place.
"""

from __future__ import annotations

import pytest

from tests.harness.forkserver import verl

WORKER = "tests.patches.verl.logprob_entropy_training_ranks"
ENGINE = tuple(
    f"engine-{case}"
    for case in (
        *("bf16-packed-entropy-temperature", "bf16-packed", "fp32-packed-entropy", "fp32-entropy"),
        *("bf16-packed-entropy-chunks", "fp32-packed-entropy-recompute"),
    )
)
# megatron-core shares out the positions of rows that are not packed through pinned memory.
PACKED = tuple(case for case in ENGINE if "-packed" in case)
ACTOR = ("actor-bf16-packed-entropy", "actor-bf16-packed")
MUTATED = "has been modified by an inplace operation"

RUNS = {
    "0.9": (None, 2, ENGINE, ()),
}
MORE = {
    "0.4": ("0.4", 2, ACTOR, ()),
    "0.9 on one rank": (None, 1, ENGINE, ()),
    "0.9 on four ranks": (None, 4, ENGINE, ()),
    "0.9, context parallel": (None, 2, PACKED, ("--context-parallel", "2")),
    "0.9, tensor and context parallel": (None, 4, PACKED, ("--context-parallel", "2")),
    "0.8": ("0.8", 2, ENGINE[:2], ()),
    "0.7, engine": ("0.7", 2, ("engine-bf16-packed-entropy", "engine-fp32-packed-entropy"), ()),
    "0.7, actor": ("0.7", 2, (*ACTOR, "actor-bf16-packed-entropy-temperature"), ()),
    "0.6, actor": ("0.6", 2, (*ACTOR, "actor-bf16-packed-entropy-temperature"), ()),
}


@pytest.fixture(
    scope="module",
    params=[*RUNS, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MORE)],
)
def reports(run_ranks, request):
    release, ranks, cases, options = {**RUNS, **MORE}[request.param]
    return run_ranks(WORKER, *options, *cases, levels=verl(release), ranks=ranks, TORCHDYNAMO_DISABLE="1")


def found(reports):
    for report in reports:
        yield from ((name, case) for name, case in report.items() if name != "row")


def test_every_backward_is_in_place(reports):
    for name, case in found(reports):
        assert case["observed"] == [{}, {"backward in place": 2}], name


def test_as_released_it_crashes_where_an_entropy_is_not_of_a_copy(reports):
    """Of logits into which the cross entropy writes (0.4), and of chunks that are views of the same logits (0.9)."""
    for report in reports:
        old = report["row"]["version"] == "0.4.0"
        for name, case in report.items():
            if name != "row":
                crashes = name.endswith("-chunks") or (old and "entropy" in name)
                assert (MUTATED in (case["failed"] or "")) == crashes, name


def test_log_probabilities_are_the_same_bit_for_bit(reports):
    for name, case in found(reports):
        same = {what: value for what, value in case["same"].items() if what.endswith("log_probs")}
        assert same, name
        if len(reports) < 4:  # from three ranks on, gloo adds up in another order for sums of another length
            assert all(same.values()), name
        assert all(case["distance"][what] <= 1e-6 for what in same), name


def test_entropies_are_the_same_but_for_rounding(reports):
    """Of at most log 64 = 4.2. verl's are the difference of two numbers of the size of the logits, up to 30."""
    for name, case in found(reports):
        distances = [value for what, value in case["distance"].items() if what.endswith("entropy")]
        assert bool(distances) == ("entropy" in name), name
        assert all(value <= 16 * 30 * 2**-23 for value in distances), name


def test_every_gradient_is_as_before(reports):
    """In fp32 but for rounding. In bfloat16 the model's backward begins with a cast, and nothing is left of that."""
    for name, case in found(reports):
        assert case["gradients_found"] > 20
        assert case["largest_deviation"] <= (2**-8 if "bf16" in name else 4e-6), name
        assert case["losses"][1] == pytest.approx(case["losses"][0], rel=1e-5)


def test_fewer_collectives(reports):
    """Of two micro-batches: three less for the entropy, one for log-probabilities; none on one rank."""
    for name, case in found(reports):
        before, after = case["all_reduces"]
        expected = 8 if "entropy" in name else 2
        if name.endswith("-chunks") or len(reports) == 1:
            assert after < before, name
        else:
            assert before - after in (expected, 2 * (6 if "entropy" in name else 3)), name


def test_the_report_says_so(reports):
    for report in reports:
        assert report["row"]["status"] == "applied"
        assert report["row"]["observations"] == {"backward in place": 2}
