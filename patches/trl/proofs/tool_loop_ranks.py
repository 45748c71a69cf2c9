"""What GRPO's tool loop generates, from tool_loop.py's engines: ``--out FOLDER --patches A,B CASE...``.

Each case as released, with the patches, and after revert(). A case that fails or hangs leaves the ranks at unlike
collectives, so only one such case may be given, and before it is repaired it is looked at alone: ``--only STATE``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

import rlhf_patches
from rlhf_patches.patches.trl.proofs import tool_loop
from rlhf_patches.proving import states

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
TRAINERS: dict[str, Any] = {}
SOME = ("first w1", "both w2", "never w3", "twice w4")
NONE = ("never w1", "never w2", "never w3", "never w4")
CASES: dict[str, tuple[tuple[tuple[str, ...], ...], dict[str, Any]]] = {
    # prompts of each rank, two conversations of each; settings
    "server": ((SOME, SOME), {}),
    "evaluated": ((SOME, SOME), {}),
    "colocate": ((SOME, SOME), {"vllm_mode": "colocate"}),
    "no tools": ((SOME, SOME), {"tools": False}),
    "not vllm": ((SOME, SOME), {"use_vllm": False}),
    "3 and 1": ((("both w1", "first w2", "never w3"), ("never w1", "first w4", "never w5")), {}),
    "3 and 1, then 1 and 0": ((("twice w1", "first w2", "never w3"), ("never w1", "first w4", "never w5")), {}),
    "1 and 3": ((("never w1", "first w4"), ("both w1", "first w2")), {}),
    "0 and 2": ((NONE, ("twice w1", "never w2", "never w3", "never w4")), {}),
    "one engine, 3 and 1": (
        (("both w1", "first w2", "never w3"), ("never w1", "first w4", "never w5")),
        {"vllm_mode": "colocate", "vllm_tensor_parallel_size": 2},
    ),
    "one engine, then 1 and 0": (
        (("twice w1", "first w2", "never w3"), ("never w1", "first w4", "never w5")),
        {"vllm_mode": "colocate", "vllm_tensor_parallel_size": 2},
    ),
    "overflow": (
        (("both w1 w2 w3 w4 w5 w6 w7 w8 w9", "first w2"),) * 2,
        {"vllm_mode": "colocate", "vllm_max_model_length": 20},
    ),
    "own engines": ((("twice w1", "first w2"), ("never w1", "first w4")), {"vllm_mode": "colocate"}),
    "overlong on one rank": (
        (("both w1 w2 w3 w4 w5 w6 w7 w8 w9", "never w2"), ("both w1", "never w2")),
        {"max_position_embeddings": 20},
    ),
    "one turn": ((SOME, ("first w5", "never w6", "never w7", "twice w8")), {"max_tool_calling_iterations": 1}),
}


def trainer(settings: dict[str, Any], out: Path, seconds: int) -> Any:
    """One for each of the settings; patches change its methods."""
    key = json.dumps(settings)
    if key not in TRAINERS:
        TRAINERS[key] = tool_loop.trainer(out, ddp_timeout=seconds, **settings)
    return TRAINERS[key]


def observed(case: str, out: Path, seconds: int) -> dict[str, Any]:
    """The turns of this rank's conversations, and what its engine was asked for."""
    prompts, settings = CASES[case]
    made = trainer(settings, out, seconds)
    engine = getattr(made, "vllm_generation", None)
    engine = vars(engine).get("vllm_client") or vars(engine).get("llm") if engine else None
    if engine:
        engine.begin()
    torch.manual_seed(0)
    if RANKS > 1:
        torch.distributed.barrier()  # so that what is waited for is not the other rank's start
    counted = tool_loop.Collectives()
    try:
        with counted:
            batch = tool_loop.generated(made, prompts[RANK], train=case != "evaluated")
    except Exception as error:  # a collective that fails, or one that the other rank is not at
        return {"failed": type(error).__name__, "text": str(error)[:200]}
    scores = batch.get("sampling_per_token_logps")
    return {
        "turns": tool_loop.turns(batch) if scores is not None else None,
        "asked": list(engine.asked) if engine else [],
        "tokens": batch["completion_ids"].tolist(),
        "mask": batch["tool_mask"].tolist() if "tool_mask" in batch else None,
        "scores": scores.tolist() if scores is not None else None,
        "collectives": counted.names,
    }


def overridden(out: Path) -> str:
    """The same by a trainer with a method of its own around TRL's, of which the arguments are those of the release."""
    made = trainer({}, out, 240)
    theirs = type(made)._generate_single_turn

    class Own(type(made)):  # type: ignore[misc]
        def _generate_single_turn(self, prompt_ids: Any, images: Any, multimodal_fields: Any) -> Any:
            return theirs(self, prompt_ids, images, multimodal_fields)

    kept, made.__class__ = type(made), Own
    kinds = {kind for row in tool_loop.turns(tool_loop.generated(made, SOME)) for kind in row}
    made.__class__ = kept
    return "wrong" if "wrong" in kinds else "own"


def main() -> None:
    parser = states.parser()
    parser.add_argument("--patches", required=True)
    parser.add_argument("--only", choices=("before", "after"))
    parser.add_argument("cases", nargs="+")
    options = parser.parse_args()
    names = options.patches.split(",")
    tool_loop.install()
    import trl

    found: dict[str, Any] = {"version": trl.__version__}
    for state in ("before", "after", "reverted"):
        if options.only not in (None, state):
            continue
        if state == "after":
            rows = rlhf_patches.apply(only=names)
            found["status"] = {name: rows[name].status.value for name in names}
        # Unpatched a rank may wait for one that has left.
        seconds = 8 if options.only == "before" else 240
        found[state] = {case: observed(case, options.out, seconds) for case in options.cases}
        if state == "after":
            reached = rlhf_patches.report()[names[0]].reached
            found["reached"] = reached and reached.to_dict()
        if "evaluated" in options.cases and state != "reverted":
            found.setdefault("overridden", {})[state] = overridden(options.out)
        rlhf_patches.revert()
    (options.out / f"rank{RANK}.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
