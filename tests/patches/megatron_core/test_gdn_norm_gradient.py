"""megatron-core-gdn-norm-gradient on the real megatron-core: before, after, and after a revert."""

from __future__ import annotations

import functools

import pytest

from tests.harness.forkserver import megatron

WORKER = "tests.patches.megatron_core.gdn_norm_gradient_ranks"
# Float32 against float64, sums over 24 tokens of products through a recurrence of 12; the worst seen is 4e-6.
EXACT = 2**-16
NORM = "layers.0.out_norm.weight"
RULE_COVERAGE = {
    "minimal scope": "test_the_sum_is_megatrons_own_where_it_makes_one",
    # every other gradient is what it was, bit for bit
    "no side effects": "test_the_norms_gradient_is_that_of_all_heads",
    "backward compatible": (
        "test_the_sum_is_megatrons_own_where_it_makes_one",
        "test_a_frozen_norm",
        "test_users_repairs",
    ),
    "known": "test_users_repairs",
    "no new blocking": "test_the_norms_gradient_is_that_of_all_heads",  # one all-reduce more, which all ranks make
    "stays as released, bit for bit": "test_the_sum_is_megatrons_own_where_it_makes_one",
    "does not change a model that was built": "because only `__init__` marks a weight, and only of the model itself",
    "does not change gradients if your own repair": "test_users_repairs",
}
exhaustive = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def run(run_ranks):
    @functools.cache
    def run(*arguments, ranks=2, tp=2, release=None):
        return run_ranks(
            WORKER, "--tp", str(tp), *arguments, levels=megatron(release), ranks=ranks, TORCHDYNAMO_DISABLE="1"
        )

    return run


@pytest.mark.parametrize(
    ("ranks", "tp", "release"),
    [
        (2, 2, None),
        pytest.param(2, 2, "megatron-0.19", marks=exhaustive),
        pytest.param(4, 2, None, marks=exhaustive, id="data parallel"),
    ],
)
def test_the_norms_gradient_is_that_of_all_heads(run, ranks, tp, release):
    reports = run(ranks=ranks, tp=tp, release=release)
    for report in reports:
        assert report["row"]["status"] == "applied", report["row"]
        before, after = report["before"], report["after"]
        assert before["errors"][NORM] > 0.3
        assert len(after["errors"]) == 7
        for name, error in after["errors"].items():
            assert error < EXACT, name
            if name != NORM:  # the norm of another layer among them
                assert after["bits"][name] == before["bits"][name], name
        assert after["all-reduced"] == [*before["all-reduced"], 8]  # as many numbers as a head is wide
        assert report["reverted"]["bits"] == before["bits"]
        assert report["reverted"]["all-reduced"] == before["all-reduced"]
    first, second = (report["before"]["bits"][NORM] for report in reports[:2])
    assert first != second  # the copies part
    assert len({str(report["after"]["bits"][NORM]) for report in reports}) == 1


@pytest.mark.parametrize(("tp", "arguments"), [(2, ("--sequence",)), (1, ())], ids=["sequence parallel", "whole"])
def test_the_sum_is_megatrons_own_where_it_makes_one(run, tp, arguments):
    """With sequence parallelism and without tensor parallelism: right before, and the same after, bit for bit."""
    for report in run(*arguments, tp=tp):
        assert report["row"]["status"] == "applied"
        assert max(report["before"]["errors"].values()) < EXACT
        assert report["after"] == report["before"]


def test_a_frozen_norm(run):
    """It has no gradient, and no rank waits for one."""
    for report in run():
        assert NORM not in report["after"]["frozen"]["errors"]
        assert report["after"]["frozen"] == report["before"]["frozen"]


@pytest.mark.parametrize("release", [None, pytest.param("megatron-0.19", marks=exhaustive)])
def test_users_repairs(run, release):
    """In a norm of their own, a layer that derives from Megatron's, or a hook: right before, and the same after."""
    for report in run(release=release):
        before, after = report["before"]["workarounds"], report["after"]["workarounds"]
        assert sorted(before) == ["hook", "layer", "norm"]
        assert max(max(each["errors"].values()) for each in before.values()) < EXACT
        assert after == before
