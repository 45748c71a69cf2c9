"""transformers' Trainer: a step of several micro-batches."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

PATCH = "transformers-accumulation-scale"
WORDS = "gradient of an optimizer step, 4 micro-batches on each of two ranks, at Trainer's defaults"
CASES = {
    "T5": Case("transformers", PATCH, "T5, 4 micro-batches x 2 ranks", f"T5: {WORDS}"),
    "Llama classifier": Case("transformers", PATCH, "Llama classifier, the same", f"Llama classifier: {WORDS}"),
}


def rows(reports: Reports) -> Iterator[Row]:
    """A step of several micro-batches, compared with the mean of their losses in float64."""
    report, _ = reports
    for name, case in CASES.items():
        before, after = (report[state][name]["gradients"][0] for state in ("before", "after"))
        without, with_it = (f"{found['times']:.3f} x its size" for found in (before, after))
        verdict = f"float64 {after['off by']:.0e}"
        repaired = abs(before["times"] - 8) < 1e-3 and after["off by"] < 1e-5
        words = (without, with_it, f"the definition in float64: {after['off by']:.0e}")
        # In transformers 4.57 only the classification heads have the bug.
        unaffected = max(before["off by"], after["off by"]) < 1e-5
        yield Row(case, report["version"], without, with_it, verdict, repaired, words, unaffected)


PROOF = Proof(tuple(CASES.values()), rows, ranks=2, seconds=20, arguments=tuple(CASES), needs=("accelerate",), gpu=True)
