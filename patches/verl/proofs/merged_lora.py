"""Weights of a merged LoRA, as sent to the engine."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "verl",
    "verl-merged-lora",
    "LoRA merged for the engine",
    "weights sent to the engine, with lora.merge on FSDP2",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The sent weights compared with the base model and the merged model, relative to the LoRA update."""
    (report,) = reports
    before, after = (report[state]["merged"] for state in ("before", "after"))
    without, patched = (f"{found['from merged']:.2g} from merged" for found in (before, after))
    # The sent weights are bfloat16, rounded once, by at most 2**-8 of a number.
    of_base = before["from the base"] < 2**-8
    right = after["from merged"] < 2**-8
    unaffected = right and before["from merged"] < 2**-8
    yield Row(CASE, report["version"], without, patched, "rounding", of_base and right, unaffected=unaffected)


PROOF = Proof((CASE,), rows, settings=(("TORCHDYNAMO_DISABLE", "1"),))
