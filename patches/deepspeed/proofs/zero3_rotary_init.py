"""Rotary frequencies of models that are built within ``zero.Init``."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row, off_by

_NAME = "deepspeed-zero3-rotary-init"
CASES = {
    "YaRN": Case("deepspeed", _NAME, "bf16, YaRN", "bf16, YaRN: the largest error of an angle at position 2,048, rad"),
    "LongRoPE": Case(
        "deepspeed", _NAME, "bf16, LongRoPE", "bf16, LongRoPE: the largest error of an angle at position 2,048, rad"
    ),
    "vision": Case(
        "deepspeed",
        _NAME,
        "bf16, Qwen2.5-VL's vision tower",
        "bf16, the vision tower of Qwen2.5-VL: the largest error of an angle at patch 64, rad",
    ),
}


def rows(reports: Reports) -> Iterator[Row]:
    """Compare frequencies with their formulas in float64."""
    (report,) = reports
    for name, case in CASES.items():
        before, after = (report[state][name]["error"] for state in ("before", "after"))
        # float32 has 24 bits: 2,048 rad are right to 2e-4.
        yield off_by(case, report["version"], before, after, bug=0.05, tolerance=1e-3)


PROOF = Proof(tuple(CASES.values()), rows, ranks=1, seconds=15, arguments=tuple(CASES))
