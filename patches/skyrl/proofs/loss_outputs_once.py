"""What SkyRL's controller returns of the samples that it has handed to its workers."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASES = {
    name: Case(
        "skyrl",
        "skyrl-loss-outputs-once",
        f"2 ranks, {name} parallel size 2",
        f"WorkerDispatch.forward_backward, 6 samples on 2 data-parallel ranks, {name} parallel size 2",
    )
    for name in ("tensor", "sequence", "pipeline")
}
SAMPLES = list(range(6))


def rows(reports: Reports) -> Iterator[Row]:
    """The samples of the outputs, which have to come once, in their order."""
    (report,) = reports
    for name, case in CASES.items():
        before, after = (report[state][name] for state in ("before", "after"))
        without, with_it = (f"{len(found)} outputs" for found in (before, after))
        words = (f"{without}, of the samples {before}", f"{with_it}, of the samples {after}", "each once")
        yield Row(case, report["version"], without, with_it, "each once", before != SAMPLES == after, words)


PROOF = Proof(tuple(CASES.values()), rows, needs=("ray",))
