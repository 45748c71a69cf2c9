"""Keys and values that layers share, in training."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row, off_by

CASE = Case(
    "transformers",
    "transformers-shared-kv-training",
    "Gemma 3n without a cache",
    "gradient without a cache, compared with a cached forward pass; two of four layers share keys and values",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The gradient, compared with that of a forward pass with a cache in float64."""
    (report,) = reports
    before, after = (report[state]["Gemma3n"]["gradient"] for state in ("before", "after"))
    # float32, four layers.
    yield off_by(CASE, report["version"], before, after, bug=0.1, tolerance=1e-4)


PROOF = Proof((CASE,), rows, arguments=("Gemma3n",), seconds=15, gpu=True)
