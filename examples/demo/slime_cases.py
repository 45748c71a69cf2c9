"""slime's whitened advantages: the worker of the tests, on a function of ours with slime's statements."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cases import Case, Group, Row, Runner

from tests.harness.warm import MEGATRON, Level

WHITENING = Case(
    "slime",
    "slime-context-parallel-whitening",
    "--normalize-advantages",
    "--normalize-advantages on two context-parallel and two data-parallel ranks",
)
STANDIN = Path(__file__).parents[2] / "tests" / "harness" / "standins" / "slime_loss"


def whitening(runner: Runner) -> Iterator[Row]:
    """compute_advantages_and_returns on four ranks."""
    levels = (*MEGATRON, Level("tests.harness.loading:torch", str(STANDIN)))
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


GROUPS = (Group((WHITENING,), whitening),)
