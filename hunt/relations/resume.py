"""Steps that are saved, loaded and gone on with are those without a stop: parameters, optimizer, order of data."""

from hunt.relations import Pair

PARTS = ("state", "samples", "loss")
STEPS = {"micro_batch": 2, "rows": 8, "dropout": 0.1}
SIX_AN_EPOCH = {**STEPS, "rows": 12, "steps": 12}  # of the last two, two epochs may be alike by chance

PAIRS = [
    Pair("in-an-epoch", {**STEPS, "steps": 4}, {**STEPS, "steps": 4, "resume_at": 2}, PARTS),
    Pair("at-an-epochs-end", SIX_AN_EPOCH, {**SIX_AN_EPOCH, "resume_at": 6}, PARTS),
    Pair("in-the-second-epoch", SIX_AN_EPOCH, {**SIX_AN_EPOCH, "resume_at": 8}, PARTS),
    Pair(
        "accumulating",
        {**STEPS, "steps": 3, "accumulation": 2},
        {**STEPS, "steps": 3, "accumulation": 2, "resume_at": 1},
        PARTS,
    ),
    *(
        Pair(
            f"in-the-second-epoch-{drawn}",
            {**STEPS, "steps": 8, "drawn_by": drawn},
            {**STEPS, "steps": 8, "drawn_by": drawn, "resume_at": 6},
            PARTS,
        )
        for drawn in ("by-length", "without-a-seed", "dispatched", "streamed")
    ),
]
