"""The loss of verl's critics on its engine for FSDP, in micro-batches on two ranks."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

from .gmpo_micro_batches import scaled

NAME = "two"
CASE = Case(
    "verl",
    "verl-critic-loss-scale",
    "critic, 2 ranks, 2 micro-batches",
    "critic, token-mean, 2 ranks, 2 micro-batches of 2 sequences: size of the gradient",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The gradient of a mini-batch, compared with the clipped value loss in float64."""
    found = [tuple(report[state]["cases"][NAME] for state in ("before", "after")) for report in reports]
    yield scaled(CASE, reports, found, bug=0.5)


PROOF = Proof((CASE,), rows, ranks=2, seconds=20, arguments=(NAME,), settings=(("TORCHDYNAMO_DISABLE", "1"),))
