"""megatron-core-cross-entropy-in-place on the real megatron-core: before, after, and after a revert."""

from __future__ import annotations

import functools

import pytest

from tests.harness.forkserver import TORCH, megatron

WORKER = "tests.patches.megatron_core.cross_entropy_in_place_ranks"
# Float32 arithmetic on logits up to 16 and sums of 64 to 256 terms; gradients are rounded to the logits' dtype once.
LOSSES = 16 * 2**-20
GRADIENT = {"float32": 2**-20, "bfloat16": 2**-8, "float16": 2**-11 + 2**-20}
IN_PLACE = {"backward in place": 1}
RULE_COVERAGE = {
    "minimal scope": "test_losses_gradients_and_collectives",  # label smoothing stays Megatron's own, bit for bit
    "no side effects": "test_the_callers_logits_are_what_they_were",
    "backward compatible": ("test_whatever_megatron_takes", "test_within_torch_compile"),
    "no new blocking": "because every rank makes two all-reduces, or Megatron's own; no lock is held",
    "does not change the logits": "test_the_callers_logits_are_what_they_were",
    "bitwise identical": ("test_losses_gradients_and_collectives", "test_whatever_megatron_takes"),
    "Label smoothing uses": "test_whatever_megatron_takes",
    "writes into the logits only if": "test_the_gradient_is_written_over_the_logits_where_nothing_else_reads_them",
}
exhaustive = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def run(run_ranks):
    @functools.cache
    def run(*parts, ranks=2, tp=2, release=None):
        return run_ranks(WORKER, "--tp", str(tp), *parts, levels=megatron(release), ranks=ranks)

    return run


everywhere = pytest.mark.parametrize(
    ("ranks", "tp", "release"),
    [
        (2, 2, None),
        pytest.param(1, 1, None, marks=exhaustive),
        pytest.param(4, 4, None, marks=exhaustive),
        pytest.param(4, 2, None, marks=exhaustive, id="context parallel"),
        pytest.param(2, 2, "megatron-0.10", marks=exhaustive),
        pytest.param(2, 2, "megatron-0.19", marks=exhaustive),
    ],
)


@everywhere
def test_losses_gradients_and_collectives(run, ranks, tp, release):
    for report in run("functions", ranks=ranks, tp=tp, release=release):
        assert report["row"]["status"] == "applied", report["row"]
        for name, after in report["after"]["functions"].items():
            before = report["before"]["functions"][name]
            if name.startswith("smoothed"):  # Megatron's own computation
                assert after["bits"] == before["bits"], name
                assert after["gradient bits"] == before["gradient bits"], name
                assert after["observed"] == {}
                continue
            assert after["losses"] <= LOSSES, name
            assert after["gradient"] <= GRADIENT[name.rpartition(" ")[2]], name
            if "recompute" in name:
                assert after["observed"] == IN_PLACE, name
                continue
            assert after["dtypes"][0] == "torch.float32"
            assert after["collectives"] == ([2, 0] if tp > 1 else [0, 0]), name
            if "failed" not in before:
                assert before["collectives"][0] >= 2
                assert before["losses"] <= LOSSES, name
                if tp <= 2 and not release:  # from three ranks on, gloo adds up in another order
                    assert after["bits"] == before["bits"], name
        for name, reverted in report["reverted"]["functions"].items():
            assert reverted == report["before"]["functions"][name], name


@everywhere
def test_the_callers_logits_are_what_they_were(run, ranks, tp, release):
    """After the loss, for whoever looks, and after backward, for whoever holds them."""
    for report in run("functions", ranks=ranks, tp=tp, release=release):
        before, after = (report[state]["functions"] for state in ("before", "after"))
        for name in ("plain as it is float32", "fused held float32", "plain div_ float32", "plain leaf float32"):
            assert not before[name]["unchanged"], name
        assert not before["smoothed held float32"]["unchanged"]
        for name, found in after.items():
            if "recompute" not in name:
                assert found["unchanged"], name
                assert found["unchanged after backward"], name
        assert report["before"]["first step"]["shares"]
        assert report["after"]["first step"] == {"shares": False, "dtype": "torch.float32"}


@everywhere
def test_the_gradient_is_written_over_the_logits_where_nothing_else_reads_them(run, ranks, tp, release):
    for report in run("functions", ranks=ranks, tp=tp, release=release):
        for name, found in report["after"]["functions"].items():
            if name.startswith("smoothed"):
                continue
            (reason,) = found["observed"]
            in_place = not any(kind in name for kind in ("held", "leaf", "tanh"))
            assert (reason == "backward in place") == in_place, (name, reason)


def test_whatever_megatron_takes(run):
    """Targets that it broadcasts, integers for logits, one token, a loss of 0: the same numbers, bit for bit."""
    for report in run("functions"):
        before, after = report["before"]["others"], report["after"]["others"]
        assert len(before["other shape"]) == 12
        assert before["certain"] == ["0x0.0p+0"], "and not -0.0"
        for name, found in before.items():
            assert after[name] == found, name


def test_what_megatron_cannot_do(run):
    """Logits that are not contiguous, and float32 ones that the operation before needs in backward."""
    for report in run("functions"):
        failed = {name: one["failed"] for name, one in report["before"]["functions"].items() if "failed" in one}
        assert set(failed) == {"plain transposed float32", "plain transposed bfloat16", "plain tanh float32"}
        assert "modified by an inplace operation" in failed["plain tanh float32"]


def test_the_fused_one_no_longer_rounds_to_bfloat16(run):
    for report in run("functions"):
        for name in ("fused as it is float32", "fused as it is float16"):
            assert report["before"]["functions"][name]["gradient"] > 2**-11
            assert report["after"]["functions"][name]["gradient"] <= GRADIENT[name.rpartition(" ")[2]]


@pytest.mark.parametrize("release", [None, pytest.param("megatron-0.19", marks=exhaustive)])
def test_memory_beside_the_logits(run, release):
    """At 1024 tokens, at most a tenth of the logits, which is the work buffer; Megatron keeps a float32 softmax."""
    for report in run("memory", release=release):
        for name, after in report["after"]["memory"].items():
            before = report["before"]["memory"][name]
            assert max(after["forward"], after["backward"]) <= 0.1, (name, after)
            assert after["observed"] == IN_PLACE
            if name.endswith("bfloat16"):
                assert before["forward"] >= 2, name


@pytest.mark.parametrize(
    "release", [None, *(pytest.param(name, marks=exhaustive) for name in ("megatron-0.10", "megatron-0.19"))]
)
def test_a_training_step_of_a_gpt_with_full_recompute(run, release):
    """Megatron's own loss function and its own model: the same losses, the same gradients."""
    for report in run("training", release=release):
        for name, found in report["training"].items():
            assert found["parameters"] > 20
            assert found["observed"] == IN_PLACE, name
            if not release:
                assert found["same losses"], name
            # Float32; the fused one rounded the gradient of the logits to bfloat16.
            assert found["gradients"] <= (2**-8 if name == "fused" else 2**-18), (name, found)


def test_within_torch_compile(run_ranks):
    """Megatron's own code, as one graph if that is asked for, and the same losses and gradients."""
    # In a process that has not imported all of megatron-core: after that Dynamo cannot trace an all_reduce.
    (found,) = run_ranks("tests.harness.compiled_regions_ranks", "megatron-core", levels=TORCH, ranks=1)
    assert found["cases"] == ["plain: ok"]
    assert found["whole graph"] == {"plain": ["ok", "ok"]}
