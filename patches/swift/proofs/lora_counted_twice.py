"""An adapter that is merged into the weights and sent again."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "ms-swift",
    "swift-lora-counted-twice",
    "adapter, three weight updates",
    "the engine's weights after three updates of an adapter, resumed",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The engine's distance from the policy after each update, relative to the adapter's contribution."""
    (report,) = reports
    before, after = (report[state]["colocate"]["off"] for state in ("before", "after"))
    without, patched = (f"off by {max(found):.2g}" for found in (before, after))
    # bfloat16 or float32 weights, merged once.
    repaired = min(before[1:]) > 0.3 and max(after) <= 2**-7
    unaffected = max(*before, *after) <= 2**-7
    yield Row(CASE, report["version"], without, patched, "the policy", repaired, unaffected=unaffected)


PROOF = Proof((CASE,), rows, needs=("vllm",))
