"""The fused log-probabilities of hidden states that are not contiguous."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "verl",
    "verl-fused-logprob-contiguity",
    "fused kernels, a slice of states",
    "the model's gradient with fused kernels and a slice of the hidden states",
)


def rows(reports: Reports) -> Iterator[Row]:
    """Whether there is a gradient, and its distance from the plain computation."""
    (report,) = reports
    cases = report["before"]
    case = next((name for name, found in cases.items() if found["there"] != found["expected"]), next(iter(cases)))
    before, after = (report[state][case] for state in ("before", "after"))
    there = [found["there"] == found["expected"] for found in (before, after)]
    without, patched = ("a gradient" if each else "NO gradient" for each in there)
    off = max(after["errors"], default=float("inf"))
    # float32, with a small vocabulary and hidden size.
    right = there[1] and off < 1e-4
    verdict = f"plain {off:.0e}"
    yield Row(CASE, report["version"], without, patched, verdict, right and not there[0], unaffected=right and there[0])


PROOF = Proof((CASE,), rows)
