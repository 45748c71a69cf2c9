"""Dr.GRPO's loss as verl's worker makes it, on its engine for FSDP."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

from .gmpo_micro_batches import scaled

CASE = Case(
    "verl",
    "verl-dr-grpo-length-bias",
    "Dr.GRPO, 8 responses of 1 to 12",
    "loss_agg_mode seq-mean-token-sum-norm, 8 responses of 1 to 12 tokens, one a micro-batch: size of the gradient",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The gradient of a mini-batch, compared with Dr.GRPO's definition in float64."""
    found = [
        tuple(next(iter(report[state]["micro-batches"].values())) for state in ("before", "after"))
        for report in reports
    ]
    yield scaled(CASE, reports, found, bug=0.1)


PROOF = Proof(
    (CASE,),
    rows,
    seconds=20,
    arguments=("--briefly",),
    needs=("hydra",),
    settings=(("TORCHDYNAMO_DISABLE", "1"),),
)
