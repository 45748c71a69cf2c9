"""The order of prompts after a resume."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "trl",
    "trl-resume-order",
    "RLOO, resumed within an epoch",
    "prompts after a resume within an epoch, RLOOTrainer",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The trained samples, compared with an uninterrupted run."""
    (report,) = reports
    goes_on = []
    for state in ("before", "after"):
        found = dict(report[state]["RLOO"])
        whole = found.pop("whole")["weights"]
        goes_on.append([each["weights"] == whole for each in found.values()])
    without, with_it = (f"{sum(each)} of {len(each)} right" for each in goes_on)
    repaired = all(goes_on[1]) and not all(goes_on[0])
    yield Row(CASE, report["version"], without, with_it, "uninterrupted" if repaired else "NO", repaired)


PROOF = Proof((CASE,), rows, seconds=30, arguments=("RLOO",))
