"""SkyRL's trainer, resumed at the end of an epoch."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

NAME = "at an epoch's end"
CASE = Case(
    "skyrl",
    "skyrl-resume-epoch",
    "resumed at the end of epoch 1",
    "RayPPOTrainer.train, 2 epochs of 4 batches, resumed from the checkpoint at the end of the first",
)
EPOCH, SAMPLES = 4, 16


def rows(reports: Reports) -> Iterator[Row]:
    """The second epoch, in which each sample has to come once."""
    (report,) = reports
    found = {state: report[state][NAME] or [] for state in ("before", "after")}
    without, with_it = (f"{len(found[state])} of {EPOCH} batches" for state in ("before", "after"))
    samples = [sample for batch in found["after"] for sample in batch]
    right = len(samples) == len(set(samples)) == SAMPLES
    in_order = found["after"] == report["after"]["batches of a resumed run"][EPOCH - 1 :]
    repaired = not found["before"] and right and in_order
    yield Row(CASE, report["version"], without, with_it, "each once", repaired)


PROOF = Proof((CASE,), rows, arguments=(NAME,), needs=("torchdata",), settings=(("TORCHDYNAMO_DISABLE", "1"),))
