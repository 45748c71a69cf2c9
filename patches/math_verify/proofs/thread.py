"""Rewards that Math-Verify computes off the main thread."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

THREAD = Case(
    "math-verify",
    "math-verify-thread",
    "6 answers, off the main thread",
    "six answers, four of them right, off the main thread",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The results, compared with those of the main thread."""
    (report,) = reports
    main = report["before"]["math-verify"]["main"]
    before, after = (report[state]["math-verify"]["thread"] for state in ("before", "after"))
    without, with_it = (said(found) for found in (before, after))
    repaired = after == main != before and any(main)
    verdict = "main thread" if repaired else "NO"
    words = (without, with_it, f"{said(main)}: {verdict}")
    yield Row(THREAD, report["version"], without[:26], with_it, verdict, repaired, words)


def said(found: object) -> str:
    """The rewards, or the error."""
    if isinstance(found, dict):
        return str(found["error"])
    assert isinstance(found, list)
    return " ".join(f"{float(each):.0f}" for each in found)


PROOF = Proof((THREAD,), rows, arguments=("alone",))
