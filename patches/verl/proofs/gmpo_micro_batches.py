"""GMPO's loss in verl's engine for FSDP, in several micro-batches."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "verl",
    "verl-gmpo-micro-batches",
    "GMPO, 8 micro-batches",
    "policy_loss.loss_mode geo_mean, a mini-batch of 8 sequences in 8 micro-batches: size of the gradient",
)


def scaled(case: Case, reports: Reports, found: list[tuple[dict[str, float], dict[str, float]]], *, bug: float) -> Row:
    """The factor on the gradient's size; ``bug``: how far from 1 the bug's is at least.

    Args:
        case, reports: as in `rows`.
        found: each rank's gradient without the patch and with it, compared with float64.
        bug: as above.
    """
    before, after = (max((pair[place] for pair in found), key=lambda one: one["distance"]) for place in (0, 1))
    without, with_it = (f"{one['norm']:.2f} x its size" for one in (before, after))
    release = reports[0]["version"]
    # float32 against float64; 0.7 computes in bfloat16, with 2**-9 per operation.
    tolerance = 0.1 if release.startswith("0.7") else 1e-5
    repaired = before["distance"] > bug and after["distance"] < tolerance
    verdict = f"float64 {after['distance']:.0e}"
    return Row(case, release, without, with_it, verdict, repaired)


def rows(reports: Reports) -> Iterator[Row]:
    """The gradient of a mini-batch, compared with GMPO's definition in float64."""
    found = [
        tuple(next(iter(report[state]["micro-batches"].values())) for state in ("before", "after"))
        for report in reports
    ]
    yield scaled(CASE, reports, found, bug=6)


PROOF = Proof((CASE,), rows, seconds=20, arguments=("--briefly",), settings=(("TORCHDYNAMO_DISABLE", "1"),))
