"""The routers' loss of a step of several micro-batches."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "transformers",
    "transformers-moe-aux-loss",
    "Qwen3-MoE, 4 micro-batches",
    "loss of a step, output_router_logits, four micro-batches",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The loss, compared with its definition in float64."""
    (report, _) = reports
    before, after = (report[state]["Qwen3-MoE"] for state in ("before", "after"))
    without, patched = (f"{found['loss'] / found['wanted']:.3f} x its size" for found in (before, after))
    off = abs(after["loss"] / after["wanted"] - 1)
    # float32, one layer.
    repaired = before["loss"] > 1.1 * before["wanted"] and off < 1e-5
    yield Row(CASE, report["version"], without, patched, f"float64 {off:.0e}", repaired)


PROOF = Proof((CASE,), rows, ranks=2, seconds=15, arguments=("Qwen3-MoE",), needs=("accelerate",), gpu=True)
