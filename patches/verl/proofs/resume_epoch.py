"""verl's supervised fine-tuning, resumed from the last step of an epoch."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "verl", "verl-resume-epoch", "resumed after 4 of 12 steps", "resumed after one of three epochs of four steps"
)
CUT = "at an epoch's end"


def rows(reports: Reports) -> Iterator[Row]:
    """The steps after the checkpoint compared with those of a run without interruption."""
    (report,) = reports
    wanted = report["before"]["uninterrupted"]

    def right(state: str) -> bool:
        cut = report[state][CUT]
        return bool(cut["first"] + cut["resumed"] == wanted)

    steps = {each: f"{len(report[each][CUT]['resumed'])} steps" for each in ("before", "after")}
    repaired = right("after") and not right("before")
    yield Row(
        CASE, report["version"], steps["before"], steps["after"], "uninterrupted", repaired, unaffected=right("before")
    )


PROOF = Proof((CASE,), rows, needs=("hydra", "torchdata"), seconds=20)
