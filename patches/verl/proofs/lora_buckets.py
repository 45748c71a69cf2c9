"""A LoRA adapter that is sent to the engine in several buckets."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "verl",
    "verl-lora-buckets",
    "LoRA sent in four buckets",
    "layers of a LoRA adapter in the engine, sent in four buckets",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The engine's layers, each compared bitwise with the layer that was sent."""
    (report,) = reports
    before, after = (report[state]["four"] for state in ("before", "after"))
    every = len(report["after"]["one bucket"]["layers"])
    without, patched = (f"{len(found['right'])} of {every} layers" for found in (before, after))
    right = len(after["right"]) == len(after["layers"]) == every
    same = "bit for bit" if right else "NO"
    yield Row(CASE, report["version"], without, patched, same, right and len(before["right"]) < every)


PROOF = Proof((CASE,), rows, needs=("vllm",))
