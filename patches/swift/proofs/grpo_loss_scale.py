"""GRPO's losses over the tokens of all micro-batches, in ms-swift's trainer without Megatron."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASES = {
    loss: Case(
        "ms-swift",
        "swift-grpo-loss-scale",
        f"GRPO, {loss}, 3 micro-batches",
        f"rlhf_type grpo, loss_type {loss}, 3 accumulated micro-batches: size of the gradient",
    )
    for loss in ("dapo", "cispo")
}


def rows(reports: Reports) -> Iterator[Row]:
    """The gradient of a step, compared with the published objective in float64."""
    (report,) = reports
    for loss, case in CASES.items():
        before, after = (report[state][loss] for state in ("before", "after"))
        without, with_it = (f"{found['gradient']:.2f} x its size" for found in (before, after))
        # float32 through a layer, which showed as 1e-6.
        repaired = before["off"] > 0.6 and after["off"] < 1e-5
        yield Row(case, report["version"], without, with_it, f"float64 {after['off']:.0e}", repaired)


PROOF = Proof(tuple(CASES.values()), rows, seconds=20, arguments=tuple(CASES))
