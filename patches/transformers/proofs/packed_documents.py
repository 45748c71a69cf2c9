"""Documents packed into a row."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "transformers",
    "transformers-packed-documents",
    "packed documents",
    "gradient of three documents packed into a row, compared with each by itself",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The gradient, compared with that of each document by itself in float64."""
    (report,) = reports
    case = next(
        (name for name in report["before"] if name.endswith("packed") and not name.startswith("Qwen3")), "Qwen3, packed"
    )
    before, after = (report[state][case]["gradient"] for state in ("before", "after"))
    without, patched = (f"off by {found:.2g}" for found in (before, after))
    # float32, one layer.
    yield Row(CASE, report["version"], without, patched, "float64", before > 0.1 and after < 1e-5)


# gpt-oss if the release has it; the worker skips models that the release does not have.
PROOF = Proof((CASE,), rows, arguments=("GptOss, eager, packed", "Qwen3, packed"), seconds=15, gpu=True)
