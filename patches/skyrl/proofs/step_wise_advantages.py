"""SkyRL's advantages of step-wise trajectories."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

NAME = "grpo"
CASE = Case(
    "skyrl",
    "skyrl-step-wise-advantages",
    "GRPO, step_wise_trajectories",
    "GRPO, 4 trajectories of 1 to 3 steps of 2 to 7 tokens: generated tokens with a wrong advantage",
)


def expected(given: dict[str, Any], estimator: str) -> list[list[float]]:
    """Of each step's tokens: the trajectory's reward within its group (arXiv:2402.03300, 2402.14740)."""
    of_trajectory = []
    for group, reward in zip(given["groups"], given["rewards"], strict=True):
        together = [other for name, other in zip(given["groups"], given["rewards"], strict=True) if name == group]
        if estimator == "grpo":
            of_trajectory.append((reward - statistics.fmean(together)) / statistics.stdev(together))
        else:
            of_trajectory.append(reward - (sum(together) - reward) / (len(together) - 1))
    return [
        [advantage] * length for advantage, steps in zip(of_trajectory, given["steps"], strict=True) for length in steps
    ]


def wrong(found: list[list[float]], wanted: list[list[float]]) -> int:
    """The number of tokens that are off by more than float32's rounding and GRPO's epsilon."""
    pairs = [pair for row, other in zip(found, wanted, strict=True) for pair in zip(row, other, strict=True)]
    return sum(abs(a - b) > 1e-5 for a, b in pairs)


def rows(reports: Reports) -> Iterator[Row]:
    """How many tokens have another advantage than that of their trajectory."""
    (report,) = reports
    wanted = expected(report["after"]["given"], NAME)
    tokens = sum(map(len, wanted))
    before, after = (wrong(report[state][NAME], wanted) for state in ("before", "after"))
    without, with_it = (f"{number} of {tokens} tokens wrong" for number in (before, after))
    yield Row(
        CASE, report["version"], without, f"{after} wrong", "formula", before > 0 == after, (without, with_it, "")
    )


PROOF = Proof((CASE,), rows, arguments=(NAME,), settings=(("TORCHDYNAMO_DISABLE", "1"),))
