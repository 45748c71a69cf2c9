"""Linear attention of documents packed into a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "transformers",
    "transformers-packed-linear-attention",
    "packed documents",
    "gradient of three documents packed into a row, compared with each by itself",
)


def of(case: Case) -> Callable[[Reports], Iterator[Row]]:
    """The rows of a proof: the gradient, compared with that of each document by itself in float64."""

    def rows(reports: Reports) -> Iterator[Row]:
        (report,) = reports
        (before,), (after,) = (report[state].values() for state in ("before", "after"))
        without, patched = (f"off by {found['gradient']:.2g}" for found in (before, after))
        # float32, one layer of each kind.
        repaired = before["gradient"] > 0.1 and after["gradient"] < 1e-4
        yield Row(case, report["version"], without, patched, "float64", repaired)

    return rows


PROOF = Proof((CASE,), of(CASE), arguments=("Qwen3Next, packed",), seconds=15, gpu=True)
