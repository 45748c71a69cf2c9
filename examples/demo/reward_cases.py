"""Rewards that Math-Verify computes off the main thread, in verl's reward loop: the worker of the tests."""

from __future__ import annotations

from collections.abc import Iterator

from cases import Case, Group, Row, Runner

from tests.harness.forkserver import with_rewards

LOOP = Case(
    "math-verify",
    "math-verify-thread",
    "verl 0.7.1's rewards, 6 answers",
    "six answers, of which four are right, in the reward loop of verl 0.7.1",
)


def loop(runner: Runner) -> Iterator[Row]:
    """The rewards, held against those that verl's function computes on the main thread."""
    (report,) = runner.forked(
        "rlhf_patches.patches.math_verify.proofs.thread_ranks", levels=with_rewards("0.9", "0.7"), ranks=1
    )
    before, after = (report[state]["reward loop"] for state in ("before", "after"))
    right = report["before"]["verl"]["main"]
    without, with_it, main = (" ".join(f"{reward:.0f}" for reward in rewards) for rewards in (before, after, right))
    repaired = after == right and not any(before) and any(right)
    verdict = "main thread" if repaired else "NO"
    yield Row(LOOP, report["version"], without, with_it, verdict, repaired, (without, with_it, f"{main}: {verdict}"))


GROUPS = (Group((LOOP,), loop),)
