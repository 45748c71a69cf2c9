"""transformer-engine-cross-entropy-backward on TransformerEngine's own kernels, which Triton interprets on the CPU.

Against float64. Tolerances: float32 kernels, sums over 38 columns, numbers of size 1: a few units in the last place,
2**-23; float16 gradients are rounded to 2**-11, twice.
"""

from __future__ import annotations

import pytest

from tests.harness.forkserver import Level, transformer_engine

WORKER = "tests.patches.transformer_engine.cross_entropy_backward_ranks"
FLOAT32, FLOAT16 = 2**-20, 2**-9

# The mean counts ignored tokens up to 2.11.0, which the page says; the gradient is that of this mean.
NOT_REPAIRED = {"mean, ignored"}
RULE_COVERAGE = {
    "minimal scope": "test_gradients_are_those_of_float64",  # `mean` has the bits that it had
    "no side effects": "test_backward_reads_nothing_on_the_host_and_rounds_once",
    "backward compatible": ("test_a_micro_batch_without_tokens", "test_gradients_are_those_of_float64"),
    "no new blocking": "because it is one product on this rank's tensors; no lock, no collective",
    "Gradients of a mean (`reduce_loss=True`) are bitwise identical": "test_gradients_are_those_of_float64",
    "own part of the vocabulary only": "test_smoothing_on_two_ranks_still_has_a_loss_of_its_own_on_each",
}
exhaustive = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def of_release(run_ranks):
    def run(release, ranks=1):
        return run_ranks(WORKER, levels=transformer_engine(release), ranks=ranks)

    return run


@pytest.mark.parametrize(
    ("release", "ranks"),
    [
        ("2.7", 1),
        ("2.10", 1),
        *(pytest.param(release, 1, marks=exhaustive) for release in ("2.2", "2.4")),
        *(pytest.param(release, 2, marks=exhaustive) for release in ("2.2", "2.7", "2.10")),
    ],
)
def test_gradients_are_those_of_float64(of_release, release, ranks):
    for report in of_release(release, ranks):
        assert report["version"].startswith(release)
        assert report["row"]["status"] == "applied", report["row"]
        assert {"masked", "megatron", "plain sum", "smoothing", "mean"} <= set(report["after"])
        for name in set(report["after"]) - NOT_REPAIRED:
            before, after = report["before"][name], report["after"][name]
            bound = FLOAT16 if "float16" in name else FLOAT32
            if name != "smoothing" or ranks == 1:  # the loss was right all along
                assert max(before["loss"], after["loss"]) < FLOAT32 * 8, name
            assert after["gradient"] < bound, (name, after)
            if name.startswith("mean"):
                assert before["bits"] == after["bits"]
        for name, reverted in report["reverted"].items():
            assert reverted["bits"] == report["before"][name]["bits"], name


@pytest.mark.parametrize("release", ["2.7", *(pytest.param(one, marks=exhaustive) for one in ("2.2", "2.4"))])
def test_before_the_first_tokens_gradient_is_that_of_all(of_release, release):
    (report,) = of_release(release)
    found = report["before"]
    for name in ("masked", "masked, [B, S]", "masked, one sequence", "masked, float16", "smoothing", "megatron"):
        assert found[name]["norm"] == 0.0 < 0.1 < found[name]["exact norm"], name
    if release == "2.7":
        assert found["plain sum"]["gradient"] < FLOAT32
    else:  # divided by the number of tokens
        assert found["plain sum"]["norm"] * 10 == pytest.approx(found["plain sum"]["exact norm"], rel=FLOAT32)


def test_before_gradients_are_transposed_or_from_beyond_the_tensor(of_release):
    """2.8.0 to 2.10.0; a sum's gradient is one element, and what comes after it in memory is arbitrary."""
    (report,) = of_release("2.10")
    assert report["before"]["masked"]["gradient"] < FLOAT32
    assert report["before"]["megatron"]["gradient"] > 0.1


@pytest.mark.parametrize("release", ["2.7", "2.10", *(pytest.param(one, marks=exhaustive) for one in ("2.2", "2.4"))])
def test_where_strides_tell_the_condition_is_that_of_the_gradients(of_release, release):
    """2.7 takes the first number for all tokens: only of an expanded one it is known that this is right."""
    (report,) = of_release(release)
    wrong = {name for name, found in report["before"].items() if found["gradient"] > FLOAT16} - NOT_REPAIRED
    known = {name for name, (_, asked) in report["occurred"].items() if asked}
    assert {name for name, (held, _) in report["occurred"].items() if held} == wrong & known
    assert known >= {"plain sum", "mean"}
    multiplied = set(report["before"]) - {"mean alone"}  # a gradient of 1 is not multiplied
    assert (release == "2.7") == (known != multiplied)


@pytest.mark.parametrize("release", ["2.7", "2.10"])
def test_backward_reads_nothing_on_the_host_and_rounds_once(of_release, release):
    """As CUDA graphs need it; in place, and without a new version of the saved tensor, as the kernel does it."""
    (report,) = of_release(release)
    assert report["captured"] == {name: [True, True, True] for name in ("per token", "of a sum", "of a mean")}


@pytest.mark.parametrize("release", ["2.7", "2.10"])
def test_a_micro_batch_without_tokens(of_release, release):
    """Its kernel is launched for no row."""
    (report,) = of_release(release)
    assert report["without tokens"] == [[0, 2, 38], [0, 2, 38]]


@pytest.mark.parametrize("release", ["2.7", pytest.param("2.4", marks=exhaustive)])
def test_the_mean_still_counts_ignored_tokens(of_release, release):
    """What the page says is not repaired: three of ten tokens are ignored."""
    (report,) = of_release(release)
    for state in ("before", "after"):
        found = report[state]["mean, ignored"]
        assert found["ratio of losses"] == pytest.approx(0.7, rel=1e-5)
        assert found["norm"] == pytest.approx(0.7 * found["exact norm"], rel=1e-5)


@exhaustive
@pytest.mark.parametrize(("release", "wrong"), [("2.7", 1.0), ("2.10", 0.1)])
def test_a_gpt_with_megatrons_own_loss_function(run_ranks, release, wrong):
    """A batch of two sequences that begin with a prompt; the gradients of all parameters, against float64."""
    worker = "tests.patches.transformer_engine.cross_entropy_backward_training_ranks"
    below = (Level("tests.harness.loading:megatron"),)
    (report,) = run_ranks(worker, levels=transformer_engine(release, below), ranks=1)
    assert report["row"]["status"] == "applied"
    if release == "2.7":
        assert report["before"]["norm"] == 0.0 < 1.0 < report["exact norm"]
    assert report["before"]["off"] >= wrong
    # Float32, through all layers; as close as with Megatron's own cross entropy.
    assert report["after"]["off"] < 2 * report["own"]["off"] < 1e-5


@exhaustive
def test_smoothing_on_two_ranks_still_has_a_loss_of_its_own_on_each(of_release):
    """The same: the logits of the other ranks are not in its mean; the gradient is right."""
    found = [report["after"]["smoothing"] for report in of_release("2.7", 2)]
    assert found[0]["ratio of losses"] != found[1]["ratio of losses"]
    assert all(one["loss"] > 1e-3 for one in found)


@exhaustive
def test_the_repaired_release_is_left_alone(of_release):
    (report,) = of_release("2.11")
    assert report["row"]["status"] == "unaffected"
    for name in set(report["before"]) - NOT_REPAIRED:
        assert report["before"][name]["bits"] == report["after"][name]["bits"]
        assert report["after"][name]["gradient"] < (FLOAT16 if "float16" in name else FLOAT32), name
