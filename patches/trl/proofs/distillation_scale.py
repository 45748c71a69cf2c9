"""Gradients of GKD's and GOLD's trainers on two ranks, and by their definitions in float64."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

from .grpo_dapo_scale import sized

TITLES = {
    "GOLD 2": "GOLD, 2 ranks, 2 micro-batches",
    "GKD 2": "GKD, 2 ranks, 2 micro-batches",
}
CASES = {
    case: Case("trl", "trl-distillation-scale", title, f"{title}: size of the gradient")
    for case, title in TITLES.items()
}


def rows(reports: Reports) -> Iterator[Row]:
    """A step of each."""
    report = reports[0]
    for name, case in CASES.items():
        before, after = (
            {"factor": found["factor of tokens"], "error": found["error of tokens"]}
            for found in (report[state][name] for state in ("before", "after"))
        )
        yield sized(case, report["version"], before, after, bug=lambda factor: factor < 0.6)


# Until 1.6.0 a loss is a mean over its micro-batch, and no patch weights these means by their numbers of tokens.
PROOF = Proof(tuple(CASES.values()), rows, ranks=2, seconds=20, arguments=tuple(CASES), needs=("trl>=1.7",))
