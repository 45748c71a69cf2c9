"""What a second run of DPO takes of the first one's log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row, off_by

_CASES = {
    "DPO, max_length": Case(
        "trl",
        "trl-precompute-cache",
        "DPO, another max_length",
        "DPOTrainer, precompute_ref_log_probs, keep_end, max_length 12 after 8: log-probabilities of the reference",
    ),
}


def rows(reports: Reports) -> Iterator[Row]:
    """A second run with another length."""
    (report,) = reports
    for name, case in _CASES.items():
        before, after = (report[state][name]["error"] for state in ("before", "after"))
        # Sums of a dozen log-probabilities of size 10 in float32 leave 1e-5.
        yield off_by(case, report["version"], before, after, bug=1.0, tolerance=1e-3)


PROOF = Proof(tuple(_CASES.values()), rows, seconds=20, arguments=tuple(_CASES))
