"""megatron-core's two cross entropies over a split vocabulary: the worker of the tests, on two ranks."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from typing import Any

from cases import Case, Group, Row, Runner

from tests.harness.warm import MEGATRON

WORKER = "tests.patches.megatron_core.cross_entropy_in_place_ranks"
PATCH = "megatron-core-cross-entropy-in-place"
LOGITS = Case("megatron-core", PATCH, "float32 logits after the loss")
FUSED = Case("megatron-core", PATCH, "its fused one, gradient", "the fused one's gradient of float32 logits")
MEMORY = Case("megatron-core", PATCH, "bfloat16 logits, memory", "the loss of 1024 tokens, bfloat16 logits, memory")


def functions(runner: Runner) -> Iterator[Row]:
    """Whether the caller's logits are what they were, and the gradient against float64."""
    reports = runner.forked(WORKER, "--tp", "2", "functions", levels=MEGATRON)
    states = ("before", "after")
    release = importlib.metadata.version("megatron-core")

    def found(state: str, name: str) -> list[dict[str, Any]]:
        return [report[state]["functions"][name] for report in reports]

    kept = [all(one["unchanged"] for one in found(state, "plain as it is float32")) for state in states]
    name = "fused held float32"
    same = [one["bits"] for one in found("before", name)] == [one["bits"] for one in found("after", name)]
    said = ["as they were" if one else "overwritten" for one in kept]
    verdict = "bit for bit" if same else "NO"
    yield Row(LOGITS, release, *said, verdict, kept == [False, True] and same, (*said, f"losses {verdict}"))
    errors = [max(one["gradient"] for one in found(state, name)) for state in states]
    off = [f"off by {error:.0e}" for error in errors]
    yield Row(FUSED, release, *off, "float64", errors[1] < 1e-6 < errors[0], (*off, "in float64"))


def memory(runner: Runner) -> Iterator[Row]:
    """Beside the logits, forward and backward, in multiples of them."""
    reports = runner.forked(WORKER, "--tp", "2", "memory", levels=MEGATRON)
    taken = []
    for state in ("before", "after"):
        found = [report[state]["memory"]["plain bfloat16"] for report in reports]
        taken.append([max(one[when] for one in found) for when in ("forward", "backward")])
    said = [f"{forward:.2f} + {backward:.2f} x" for forward, backward in taken]
    words = tuple(
        f"{forward:.2f} x the logits' in forward, {backward:.2f} x in backward" for forward, backward in taken
    )
    release = importlib.metadata.version("megatron-core")
    yield Row(MEMORY, release, *said, "a tenth", max(taken[1]) <= 0.1, (*words, "at most a tenth"))


GROUPS = (Group((LOGITS, FUSED), functions), Group((MEMORY,), memory))
