"""PEFT: the workers of the tests, on releases side by side."""

from __future__ import annotations

from collections.abc import Iterator

from cases import Case, Group, Row, Runner

from tests.harness.warm import peft

FROZEN = Case(
    "peft",
    "peft-adapter-freeze",
    "gradient, a reference is loaded",
    "norm of the policy's gradient, a frozen adapter loaded beside it",
)


def frozen(runner: Runner) -> Iterator[Row]:
    """A frozen adapter, for the reference, is loaded beside the policy's."""
    (found,) = runner.forked("tests.patches.peft.adapter_freeze_ranks", levels=peft("peft-0.20"), ranks=1)
    before, after = (found[state]["LoRA"] for state in ("released", "patched"))
    wanted = f"float64 {after['wanted norm']:.5g}"
    repaired = before["norm"] == 0 and after["off float64 by"] < 1e-5
    norms = [f"norm {one['norm']:.5g}" for one in (before, after)]
    yield Row(FROZEN, found["version"], *norms, wanted, repaired, (*norms, wanted))


GROUPS = (Group((FROZEN,), frozen),)
