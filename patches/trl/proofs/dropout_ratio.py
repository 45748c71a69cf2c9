"""RLOO with dropout: the gradient of its first step."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row, off_by

_NAME = "trl-dropout-ratio"
_LORA = Case("trl", _NAME, "RLOO, LoRA with dropout", "RLOOTrainer, lora_dropout 0.05: gradient of the first step")
_MODEL = Case(
    "trl", _NAME, "RLOO, model with dropout", "RLOOTrainer, GPT-2 with its dropout: gradient of the first step"
)


def rows(reports: Reports) -> Iterator[Row]:
    """Dropout of LoRA, and of the model."""
    (report,) = reports
    for case, name in ((_LORA, "RLOO, LoRA"), (_MODEL, "RLOO, model")):
        before, after = (report[state][name]["steps"][0]["error"] for state in ("before", "after"))
        # Forward and backward in float32 of two layers at most leave 1e-6.
        yield off_by(case, report["version"], before, after, bug=0.05, tolerance=1e-5)


PROOF = Proof((_LORA, _MODEL), rows, seconds=20, arguments=("RLOO, LoRA", "RLOO, model"))
