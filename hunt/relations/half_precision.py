"""In 16 bits steps are those of float64, up to the rounding of weights; also without ZeRO, whatever the loss scale."""

from hunt.relations import Pair

PAIRS = [
    Pair(
        f"{half}-zero{stage}{'-accumulating' * (accumulation > 1)}",
        {"half": half, "stage": None, "accumulation": accumulation, "ranks": 2},
        {"half": half, "stage": stage, "accumulation": accumulation, "ranks": 2},
        ("update",),
        tolerance=5e-2,
    )
    for half in ("fp16", "bf16")
    for stage in (0, 1, 2)
    for accumulation in (1, 2)
]
