"""DPO's first step with a model whose forward applies dropout by a function."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row, off_by

_NAME = "trl-functional-dropout"
_CASES = {
    "OPT": Case("trl", _NAME, "DPO, OPT", "DPOTrainer, OPT with dropout 0.1: gradient of the first step"),
    "Seed-OSS": Case(
        "trl", _NAME, "DPO, Seed-OSS", "DPOTrainer, Seed-OSS with dropout 0.1: gradient of the first step"
    ),
}


def rows(reports: Reports) -> Iterator[Row]:
    """Two models whose default config has such dropout."""
    (report,) = reports
    for name, case in _CASES.items():
        before, after = (report[state][name]["error"] for state in ("before", "after"))
        # Forward and backward of two layers in float32 leave 1e-6.
        yield off_by(case, report["version"], before, after, bug=0.05, tolerance=1e-4)


PROOF = Proof(tuple(_CASES.values()), rows, seconds=20, arguments=tuple(_CASES))
