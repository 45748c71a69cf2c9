"""SkyRL's normalized advantages, and the gradient of its policy loss."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any

from rlhf_patches.proving.proof import Case, Proof, Reports, Row, off_by

NAME = "grpo, 30"
CASE = Case(
    "skyrl",
    "skyrl-advantage-padding",
    "GRPO, normalized advantages",
    "GRPO, advantage_batch_normalize, 4 responses of 2 to 9 tokens, padded to 30: the gradient of the policy loss",
)
Matrix = list[list[float]]


def grpo(given: dict[str, Any]) -> Matrix:
    """Shao et al., arXiv:2402.03300, section 4.1.2: each token has the response's reward within its group."""
    advantages = []
    for group, reward, row in zip(given["groups"], given["rewards"], given["values"], strict=True):
        of_group = [other for name, other in zip(given["groups"], given["rewards"], strict=True) if name == group]
        advantages.append([(reward - statistics.fmean(of_group)) / statistics.stdev(of_group)] * len(row))
    return advantages


def gae(given: dict[str, Any], length: int, release: str) -> Matrix:
    """Schulman et al., arXiv:1506.02438, equation 16; 0.1.0 pads at the end, and bootstraps from there."""
    advantages = []
    for reward, row in zip(given["rewards"], given["values"], strict=True):
        after = length if release == "0.1.0" else len(row)
        values = row + [given["on padding"]] * (after - len(row)) + [0.0]
        deltas = [given["gamma"] * values[t + 1] - values[t] + reward * (t == len(row) - 1) for t in range(after)]
        decay = given["gamma"] * given["lambda"]
        advantages.append([sum(decay**step * delta for step, delta in enumerate(deltas[t:])) for t in range(len(row))])
    return advantages


def expected(given: dict[str, Any], case: str, release: str) -> Matrix:
    """PPO's clipped objective (arXiv:1707.06347, equation 7), of advantages of mean 0 and variance 1 over tokens."""
    estimator, _, length = case.partition(", ")
    advantages = grpo(given) if estimator == "grpo" else gae(given, int(length), release)
    tokens = [value for row in advantages for value in row]
    mean, deviation = statistics.fmean(tokens), statistics.pstdev(tokens)
    gradients = []
    for row, new, old in zip(advantages, given["log_probs"], given["old_log_probs"], strict=True):
        gradient = []
        for value, log_prob, old_log_prob in zip(row, new, old, strict=True):
            advantage, ratio = (value - mean) / deviation, math.exp(log_prob - old_log_prob)
            clipped = ratio > 1 + given["clip"] if advantage > 0 else ratio < 1 - given["clip"]
            gradient.append(0.0 if clipped else -advantage * ratio / len(tokens))
        gradients.append(gradient)
    return gradients


def deviation(found: Matrix, wanted: Matrix) -> float:
    """The largest, of one number."""
    return max(abs(a - b) for row, other in zip(found, wanted, strict=True) for a, b in zip(row, other, strict=True))


def rows(reports: Reports) -> Iterator[Row]:
    """The gradient of the loss, compared with the formulas in float64, in parts of its largest number."""
    (report,) = reports
    wanted = expected(report["after"]["given"], NAME, report["version"])
    largest = max(abs(number) for row in wanted for number in row)
    before, after = (deviation(report[state][NAME], wanted) / largest for state in ("before", "after"))
    # Sums of 21 float32 numbers of size 1 and less, divided by 21.
    yield off_by(CASE, report["version"], before, after, bug=0.01, tolerance=4e-6)


PROOF = Proof((CASE,), rows, arguments=(NAME,), settings=(("TORCHDYNAMO_DISABLE", "1"),))
