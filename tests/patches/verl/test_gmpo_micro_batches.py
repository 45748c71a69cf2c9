"""verl-gmpo-micro-batches on verl's real engine, on one and two data-parallel ranks (gmpo_micro_batches_ranks.py).

Everything is in multiples of what float64 has for the global mini-batch of eight sequences.
"""

from __future__ import annotations

import pytest

from rlhf_patches.patches.verl.proofs import gmpo_micro_batches_ranks
from tests.harness.forkserver import Level, verl

WORKER = gmpo_micro_batches_ranks.__name__
RULE_COVERAGE = {
    "minimal scope": ("test_other_losses_keep_every_bit", "test_without_the_size_of_the_mini_batch_it_is_as_released"),
    "no side effects": "because it reads two numbers and multiplies one",
    "backward compatible": "test_without_the_size_of_the_mini_batch_it_is_as_released",
    "no new blocking": "because it computes on one rank's tensors; no lock, no collective",
    "no longer depends on the micro-batch size": "test_with_it_the_gradient_is_that_of_the_mini_batch",
    "is the whole mini-batch is bitwise identical": "test_one_micro_batch_keeps_every_bit",
    "The patch does not change": "test_without_the_size_of_the_mini_batch_it_is_as_released",
}
# float32 against float64: seen up to 4e-7. 0.7 computes in bfloat16 whatever it is told, with 2**-9 per operation.
TOLERANCE = {"0.9": 1e-5, "0.8": 1e-5, "0.7": 0.1, "0.7.0": 0.1}


@pytest.fixture(
    scope="module",
    params=["0.9", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("0.8", "0.7", "0.7.0"))],
)
def release(request):
    return request.param


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def reports(run_ranks, release, request):
    levels = (*verl(None if release == "0.9" else release), Level("tests.harness.loading:verl_critic"))
    reports = run_ranks(WORKER, levels=levels, ranks=request.param, TORCHDYNAMO_DISABLE="1")
    assert len(reports) == request.param
    for report in reports:
        assert (report["status"], report["version"][: len(release)]) == ("applied", release)
    return reports


def test_without_it_the_gradient_is_multiplied_by_the_number_of_micro_batches(reports, release):
    for report in reports:
        assert len(report["before"]["micro-batches"]) == 3
        for times, found in report["before"]["micro-batches"].items():
            assert found["norm"] == pytest.approx(int(times), rel=TOLERANCE[release])
            assert found["distance"] == pytest.approx(int(times) - 1, rel=TOLERANCE[release], abs=TOLERANCE[release])


def test_with_it_the_gradient_is_that_of_the_mini_batch(reports, release):
    for report in reports:
        for found in report["after"]["micro-batches"].values():
            assert found["distance"] < TOLERANCE[release]


def test_one_micro_batch_keeps_every_bit(reports):
    for report in reports:
        assert report["after"]["micro-batches"]["1"] == report["before"]["micro-batches"]["1"]


def test_other_losses_keep_every_bit(reports):
    for report in reports:
        assert report["after"]["vanilla"] == report["before"]["vanilla"]


def test_without_the_size_of_the_mini_batch_it_is_as_released(reports):
    for report in reports:
        assert report["after"]["by hand"] == report["before"]["by hand"]


def test_it_reports_the_micro_batches_of_the_engine(reports):
    """Not one that is the whole mini-batch; unknown without the size of the mini-batch."""
    for report in reports:
        times = [*map(int, report["after"]["micro-batches"])]
        several = [each for each in times if each > 1]
        expected = {"calls": sum(times) + 3, "asked": sum(times), "held": sum(several)}
        assert report["reached"] == {
            **expected,
            "least": min(several),
            "most": max(several),
            "measure": "policy loss x",
        }


def test_reverted_it_is_verls_again(reports):
    for report in reports:
        ((times, found),) = report["reverted"]["micro-batches"].items()
        assert found == report["before"]["micro-batches"][times]
