"""Steps that are saved, loaded and gone on with are those without a stop: parameters, optimizer, order of data."""

from hunt.relations import Pair

PARTS = ("state", "samples", "loss")
STEPS = {"micro_batch": 2, "rows": 8, "dropout": 0.1}

PAIRS = [
    Pair("in-an-epoch", {**STEPS, "steps": 4}, {**STEPS, "steps": 4, "resume_at": 2}, PARTS),
    Pair("in-the-second-epoch", {**STEPS, "steps": 8}, {**STEPS, "steps": 8, "resume_at": 6}, PARTS),
    Pair(
        "accumulating",
        {**STEPS, "steps": 3, "accumulation": 2},
        {**STEPS, "steps": 3, "accumulation": 2, "resume_at": 1},
        PARTS,
    ),
    *(
        Pair(
            f"in-the-second-epoch-{drawn}",
            {**STEPS, "steps": 8, "drawn": drawn},
            {**STEPS, "steps": 8, "drawn": drawn, "resume_at": 6},
            PARTS,
        )
        for drawn in ("by-length", "without-a-seed", "dispatched", "streamed")
    ),
]
