"""Micro-batches of a step where the optimizer is offloaded."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "deepspeed",
    "deepspeed-offload-accumulation",
    "ZeRO-2, offload, 4 micro-batches",
    "ZeRO-2 with an offloaded optimizer, 4 micro-batches a step: norms and parameters of three steps",
)


def rows(reports: Reports) -> Iterator[Row]:
    """Norms and parameters of three steps, held against a loop in float64."""
    before, after = ([report[state]["four"] for report in reports] for state in ("before", "after"))
    worst = [max(max(found["error"], found["norm error"]) for found in each) for each in (before, after)]
    without, with_it = (f"off by {error:.2g}" for error in worst)
    # float32, a few layers and steps.
    repaired, unaffected = worst[0] > 0.1 > 1e-5 > worst[1], max(worst) < 1e-5
    yield Row(CASE, reports[0]["version"], without, with_it, "float64", repaired, unaffected=unaffected)


PROOF = Proof((CASE,), rows, ranks=2, seconds=15, arguments=("four",))
