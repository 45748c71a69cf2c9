"""Seeds of the samples of one prompt."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "verl",
    "verl-rollout-seed",
    "full_determinism, a group",
    "samples of one prompt, full_determinism",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The number of different samples in a group, and whether a second run repeats them."""
    (report,) = reports
    before, after = (report[state]["V1"]["tokens"] for state in ("before", "after"))
    different = [len({tuple(tokens) for tokens in found}) for found in (before, after)]
    without, patched = (f"{number} of {len(before)} differ" for number in different)
    again = report["after"]["V1"] == report["after"]["V1 again"]
    repaired = different == [1, len(after)] and again
    yield Row(CASE, report["version"], without, patched, "same again" if again else "NO", repaired)


PROOF = Proof((CASE,), rows, needs=("vllm",))
