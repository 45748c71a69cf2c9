"""Weights that resuming does not load."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "transformers",
    "transformers-resume-weights",
    "a checkpoint, other names",
    "weights after resume_from_checkpoint, if the checkpoint's files have other names",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The weights, compared with the saved ones, bit for bit."""
    (report,) = reports
    case = next(name for name, found in report["before"].items() if found.get("off"))
    before, after = (report[state][case] for state in ("before", "after"))
    without, patched = (f"{len(found['off'])} of {found['of']} off" for found in (before, after))
    repaired = len(before["off"]) > 0 == len(after["off"])
    yield Row(CASE, report["version"], without, patched, "bit for bit" if repaired else "NO", repaired)


PROOF = Proof((CASE,), rows, seconds=15, arguments=("Qwen2.5-VL, loaded",), needs=("accelerate",))
