"""A causal model whose padding token is its end."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row, off_by

CASE = Case(
    "transformers",
    "transformers-collator-eos",
    "Trainer, pad_token = eos_token",
    "Trainer with DataCollatorForLanguageModeling, pad_token = eos_token: error of the gradient",
)


def rows(reports: Reports) -> Iterator[Row]:
    """Two texts of four and two tokens, each with its end."""
    (report,) = reports
    before, after = (report[state]["padded"]["gradient"] for state in ("before", "after"))
    # Forward and backward in float32, of one layer.
    yield off_by(CASE, report["version"], before, after, bug=0.1, tolerance=1e-5)


PROOF = Proof((CASE,), rows, seconds=15, arguments=("padded",))
