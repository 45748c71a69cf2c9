"""QLoRA under FSDP2 with efficient loading."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

NAME = "QLoRA, on meta elsewhere"
CASE = Case(
    "accelerate",
    "accelerate-fsdp2-load-by-position",
    "FSDP2, QLoRA, efficient loading",
    "FSDP2, QLoRA, cpu_ram_efficient_loading, 3 steps: the adapter",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The adapter's way, compared with plain SGD in float64."""
    before, after = ([report[state][NAME] for report in reports] for state in ("before", "after"))
    raised = [found["raised"] for found in before]
    error = max(found.get("error", 1.0) for found in after)
    # Float32 arithmetic of three steps.
    repaired = all(raised) and error < 1e-5 and not any(found["start"] for found in after)
    with_it = f"off by {error:.0e}"
    without = "rank 0 raises, 1 waits" if all(raised) else "no exception"
    words = (f"rank 0: {raised[0]}; rank 1 waits" if all(raised) else without, with_it, "float64")
    yield Row(CASE, reports[0]["version"], without, with_it, "float64", repaired, words)


PROOF = Proof((CASE,), rows, ranks=2, seconds=20, arguments=(NAME,), needs=("bitsandbytes",))
