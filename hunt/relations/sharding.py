"""A step's gradient is the same whole as in DDP, in ZeRO and in FSDP, accumulated or not, whatever the groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hunt import sharded
from hunt.relations import Pair

PARTS = ("loss", "gradient", "norm", "rates")
TWO = {"ranks": 2}
FOUR = {**TWO, "accumulation": 4}
ZERO: dict[str, dict[str, Any]] = {"ddp": {"zero": 0}, **{f"zero{stage}": {"zero": stage} for stage in (1, 2, 3)}}
OFFLOADED: dict[str, dict[str, Any]] = {f"zero{stage}-offload": {"zero": stage, "offload": True} for stage in (1, 2, 3)}
FSDP: dict[str, dict[str, Any]] = {"fsdp-ddp": {"fsdp": 0}, "fsdp1": {"fsdp": 1}, "fsdp2": {"fsdp": 2}}
# What the two sides have in common; bfloat16's gradients have some 3 digits.
COMMON: dict[str, dict[str, Any]] = {
    "groups": {"groups": "rates", "schedule": "falling"},
    "empty-group": {"groups": "empty", "schedule": "falling"},
    **{f"rare-{rare}": {"rare": rare} for rare in ("not-first", "not-last", "odd", "not-second")},
}
WHOLE: dict[str, Any] = {"sharding": None, "micro_batch": 8, "accumulation": 1, "ranks": 1}
PARTED = {"micro_batch": 2, "accumulation": 2, **TWO}
BF16 = {"dtype": "bfloat16"}


def pairs(name: str, sharded: Mapping[str, Any], whole: Mapping[str, Any]) -> Iterator[Pair]:
    """Of one kind of sharding."""
    yield Pair(f"{name}-accumulating", whole, {**sharded, **FOUR}, PARTS)
    for kind, common in COMMON.items():
        if "groups" in common and "offload" in sharded:
            continue  # where the optimizer is, is nothing to its groups
        if kind == "rare-odd" and 0 not in sharded.values():
            continue  # ranks that use different parameters enter different collectives: ZeRO and FSDP forbid it
        yield Pair(f"{name}-{kind}", {**common, **whole}, {**common, **sharded, **FOUR}, PARTS)
    if 0 in sharded.values():
        return  # DDP trains the parameters that it is given, without masters in float32
    more: dict[str, Any] = {"accumulate": "fp32"} if "zero" in sharded else {"precision": "bf16"}
    yield Pair(f"{name}-bfloat16", {**BF16, **whole}, {**BF16, **sharded, **FOUR, **more}, PARTS, tolerance=5e-2)


PAIRS = [
    *(each for name, sharded in {**ZERO, **OFFLOADED}.items() for each in pairs(name, sharded, {"zero": None})),
    *(each for name, sharded in FSDP.items() for each in pairs(name, sharded, {"fsdp": None})),
    *(
        Pair(f"fsdp1-reference-{when}", {"fsdp": None, "reference": when}, {"fsdp": 1, "reference": when, **TWO}, PARTS)
        for when in ("first", "second")
    ),
    # transformers' Trainer, and what stands on it.
    *(
        Pair(
            f"trainer-{name}",
            WHOLE,
            {"sharding": name, **PARTED},
            PARTS,
        )
        for name in sharded.KINDS
    ),
    # Compiled, so that DeepSpeed does not see for itself that a chunked loss reads the last layer's weight.
    Pair(
        "trainer-zero3-chunked",
        {**WHOLE, "chunked": True, "compiled": True},
        {"sharding": "zero3", **PARTED, "chunked": True, "compiled": True},
        PARTS,
    ),
    # Only rank 0 has the weights, of which some may be in four bits.
    Pair("fsdp2-efficient", {"fsdp": None, "efficient": True}, {"fsdp": 2, "efficient": True, **TWO}, PARTS),
    Pair(
        "fsdp2-efficient-quantized",
        {"fsdp": None, "efficient": True, "quantized": True},
        {"fsdp": 2, "efficient": True, "quantized": True, **TWO},
        PARTS,
    ),
    Pair("zero2-by-hand", {"zero": None}, {"zero": 2, "by_hand": True, **FOUR}, PARTS),
    Pair("zero2-offload-by-hand", {"zero": None}, {"zero": 2, "offload": True, "by_hand": True, **FOUR}, PARTS),
    # After the warm-up each group has the learning rate that its optimizer was given.
    Pair(
        "warm-up",
        {"groups": "rates", "zero": None},
        {"groups": "rates", "zero": 1, "schedule": "warm-up", **TWO},
        ("rates",),
    ),
]
