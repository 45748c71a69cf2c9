"""slime's advantages and linear attention: the tests' workers, on code of ours with slime's statements."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cases import Case, Group, Row, Runner

from tests.harness.forkserver import MEGATRON, Level

WHITENING = Case(
    "slime",
    "slime-context-parallel-whitening",
    "--normalize-advantages",
    "--normalize-advantages on two context-parallel and two data-parallel ranks",
)
LINEAR = Case(
    "slime",
    "slime-linear-attention-gradient",
    "linear attention, CP 2",
    "gradient through linear attention on two context-parallel ranks",
)
STANDINS = Path(__file__).parents[2] / "tests" / "harness" / "standins"


def whitening(runner: Runner) -> Iterator[Row]:
    """compute_advantages_and_returns on four ranks."""
    levels = (*MEGATRON, Level("tests.harness.loading:torch", str(STANDINS / "slime_loss")))
    reports = runner.forked("tests.patches.slime.context_parallel_whitening_ranks", levels=levels, ranks=4)
    before, after = ([report[state]["long"] for report in reports] for state in ("before", "after"))
    off, repaired = (max(each["off"] for each in found) for found in (before, after))
    signs, tokens = (sum(each[name] for each in before) for name in ("signs", "tokens"))
    yield Row(
        WHITENING,
        "stand-in",
        f"off by {off:.2g}, {signs} signs",
        f"{repaired:.0e}, {sum(each['signs'] for each in after)}",
        "float64",
        off > 0.3 and signs > 0 and repaired < 1e-5,
        (
            f"advantages are off by up to {off:.2g}, {signs} of {tokens} have another sign",
            f"off by {repaired:.0e}",
            "whitened in float64 over whole responses",
        ),
    )


def linear_attention(runner: Runner) -> Iterator[Row]:
    """HuggingfaceAttention on two ranks."""
    levels = (*MEGATRON, Level("tests.harness.loading:torch", str(STANDINS / "slime_linear_attention")))
    worker = "tests.patches.slime.linear_attention_gradient_ranks"
    reports = runner.forked(worker, "1", "2", levels=levels)
    off = [max(report[state]["states"] for report in reports) for state in ("before", "after")]
    said = (f"off by {off[0]:.0%}", f"off by {off[1]:.0e}")
    repaired = off[0] > 0.3 and off[1] < 1e-5
    yield Row(LINEAR, "stand-in", *said, "float64", repaired, (*said, "the whole layer in float64"))


GROUPS = (Group((WHITENING,), whitening), Group((LINEAR,), linear_attention))
