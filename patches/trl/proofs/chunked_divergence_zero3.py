"""Distillation's loss in chunks, of heads that ZeRO-3 has partitioned."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

from .chunked_nll_zero3 import trained

CASE = Case(
    "trl",
    "trl-chunked-divergence-zero3",
    "distillation, ZeRO-3",
    "distillation's loss in chunks, heads that ZeRO-3 has partitioned on 2 ranks: the student's gradient",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The gradients, compared with the definition in float64."""
    yield trained(CASE, reports)


PROOF = Proof(
    (CASE,),
    rows,
    ranks=2,
    seconds=15,
    arguments=("divergence",),
    needs=("deepspeed",),
    worker="chunked_nll_zero3_ranks",
)
