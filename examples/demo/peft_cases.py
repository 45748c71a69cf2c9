"""PEFT: the workers of the tests, on releases side by side."""

from __future__ import annotations

from collections.abc import Iterator

from cases import Case, Group, Row, Runner, proved

from tests.harness.warm import peft

DRIFT = Case(
    "peft",
    "peft-lora-merge-drift",
    "base weights, 100 merges, bf16",
    "base weights in bfloat16, 100 merges and unmerges of an adapter, as for weight synchronisation",
)


def drift(runner: Runner) -> Iterator[Row]:
    """An adapter is merged into the base weights and unmerged, after each of 100 steps."""
    (found,) = runner.forked("tests.patches.peft.lora_merge_drift_ranks", levels=peft(None), ranks=1)
    before, after = (found[state]["bfloat16"] for state in ("before", "after"))
    moved = [f"moved by {one['moved']:.2%}" for one in (before, after)]
    verdict = "bit for bit" if after["same"] else "NO"
    words = tuple(f"{text} of their mean size" for text in moved)
    yield Row(DRIFT, found["version"], *moved, verdict, before["moved"] > 0 and after["same"], (*words, verdict))


GROUPS = (proved("peft.adapter_freeze", lambda: peft("peft-0.20")), Group((DRIFT,), drift))
