"""Linear attention of documents packed into a row."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "transformers",
    "transformers-packed-linear-attention",
    "packed documents",
    "gradient of three documents packed into a row, compared with each by itself",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The gradient, compared with that of each document by itself in float64."""
    (report,) = reports
    case = next(iter(report["before"]))
    before, after = (report[state][case]["gradient"] for state in ("before", "after"))
    without, patched = (f"off by {found:.2g}" for found in (before, after))
    # float32, one layer of each kind.
    yield Row(CASE, report["version"], without, patched, "float64", before > 0.1 and after < 1e-4)


PROOF = Proof((CASE,), rows, arguments=("Qwen3Next, packed",), seconds=15, gpu=True)
