"""TRL's optional packages beside transformers 5.3 and later."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "trl",
    "trl-optional-packages",
    "optional packages, transformers 5",
    "optional packages, transformers from 5.3 on: those that are missing and count as installed",
)


def rows(reports: Reports) -> Iterator[Row]:
    """What TRL says of packages, compared with Python's own search for them."""
    (report,) = reports
    before, after = (report[state] for state in ("before", "after"))
    number = len(after["asked"])
    without, with_it = (f"{len(found['said to be there'])} of {number} wrong" for found in (before, after))
    right = not after["said to be there"] and not after["said to be missing"]
    words = (f"{without}: {', '.join(before['said to be there'])}", with_it, "importlib")
    repaired = bool(before["said to be there"]) and right
    # Where all of them are installed, nothing is wrong.
    yield Row(
        CASE, report["version"], without, with_it, "importlib", repaired, words, unaffected=before == after and right
    )


PROOF = Proof((CASE,), rows)
