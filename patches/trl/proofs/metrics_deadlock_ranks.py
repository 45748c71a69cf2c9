"""TRL's GRPO and RLOO trainers on two ranks whose reward functions log different names.

At the end, unpatched, rank 1 logs and rank 0 does not, and rank 1 waits until the collective's timeout.
"""

from __future__ import annotations

import datetime
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trl

import rlhf_patches
from rlhf_patches.patches.trl.proofs import small
from rlhf_patches.proving import states

NAME = "trl-metrics-deadlock"
RANK = int(os.environ["RANK"])
KINDS = ("GRPO", "RLOO")

# The names that each rank logs: metrics, any number of times each, and columns.
LOGS: dict[str, list[tuple[dict[str, list[Any]], list[str]]]] = {
    "as many, but others": [({"zero": [1.0]}, ["a"]), ({"one": [3.0]}, ["b"])],
    "the same": [({"both": [1.0, 2.0]}, ["a"]), ({"both": [5.0, 7.0]}, ["a"])],
    "on one rank": [({}, []), ({"one": [3.0, 5.0]}, ["b"])],
    "different numbers": [({"both": [1.0, 2.0, 4.5]}, []), ({"both": [5.0], "one": [torch.tensor(2.0)]}, [])],
    "vectors": [
        ({"both": [np.array([0.0, 1.0])], "one": [torch.ones(2, dtype=torch.bfloat16)]}, []),
        ({"both": [np.array([2.0, 5.0])], "one": [torch.tensor([2.0, 4.0], dtype=torch.bfloat16)]}, []),
    ],
    "arrays of one": [({"both": [np.array([1.0])]}, []), ({"both": [np.array([3.0])]}, [])],
    "vectors on one rank": [
        ({}, []),
        (
            {
                "one": [
                    np.array([1.0, 3.0]),
                    torch.tensor([0.0, 1.0], requires_grad=True),
                    np.arange(4)[::-1],
                    np.float16(3.0),
                    True,
                ]
            },
            [],
        ),
    ],
    "nothing": [({}, []), ({}, [])],
}
VECTORS = ("vectors", "arrays of one", "vectors on one rank")
WITHOUT_STALLING = ("as many, but others", "the same", "vectors", "arrays of one")


def reward(case: str) -> Any:
    metrics, columns = LOGS[case][RANK]

    def of_length(completions: list[str], log_metric: Any, log_extra: Any, **kwargs: Any) -> list[float]:
        for name, values in metrics.items():
            for value in values:
                log_metric(name, value)
        for name in columns:
            log_extra(name, [f"{RANK}{number}" for number in range(len(completions))])
        return [float(len(completion)) for completion in completions]

    return of_length


def trained(kind: str, case: str, out: Path) -> dict[str, Any]:
    """A step of the trainer: the values that it has logged under these names."""
    trainer = small.rollouts(kind, out, [reward(case)])
    trainer.train()
    logged = trainer.state.log_history[0]
    return {
        "metrics": {name: logged[name] for name in ("both", "one", "zero") if name in logged},
        "columns": {name: list(values) for name, values in trainer._logs["extra"].items()},
    }


def no_number(kind: str, out: Path) -> str:
    """Patched, if rank 1 logs a text: the exception of each rank."""

    def worded(completions: list[str], log_metric: Any, **kwargs: Any) -> list[float]:
        if RANK:
            log_metric("one", "three")
        return [0.0 for _ in completions]

    try:
        small.rollouts(kind, out, [worded]).train()
    except TypeError as error:
        return str(error)
    return ""


def stalled(kind: str, out: Path) -> dict[str, Any]:
    """Unpatched, if one rank logs."""
    store = torch.distributed.distributed_c10d._get_default_store()
    trainer = small.rollouts(kind, out, [reward("on one rank")])
    batch = [{"prompt": prompt} for prompt in small.PROMPTS[:1] * 2]
    torch.distributed.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=3), torch.distributed.group.WORLD)
    started, failed = time.monotonic(), None
    try:
        trainer._generate_and_score_completions(batch)
    except RuntimeError as error:
        failed = str(error)
    found = {"failed": failed, "seconds": time.monotonic() - started}
    store.set(f"done-{RANK}", "")
    store.wait([f"done-{1 - RANK}"])  # not a collective, which the other rank would treat as its gather
    return found


def main() -> None:
    parser = states.parser()
    parser.add_argument("--released", action="store_true", help="a release without the bug, as it is")
    options = parser.parse_args()

    def observe(*cases: str) -> dict[str, Any]:
        return {case: {kind: trained(kind, case, options.out) for kind in KINDS} for case in cases}

    found: dict[str, Any] = {"version": trl.__version__}
    if options.released:
        found["released"] = observe(*(case for case in LOGS if case not in VECTORS))  # it takes numbers only
    else:
        found["before"] = observe(*WITHOUT_STALLING)
        found["status"] = rlhf_patches.apply(only=NAME)[NAME].status.value
        found["after"] = observe(*LOGS)
        found["no number"] = no_number("GRPO", options.out)
        rlhf_patches.revert()
        found["reverted"] = observe(*WITHOUT_STALLING)
        found["stalled"] = stalled("GRPO", options.out)
    (options.out / f"rank{RANK}.json").write_text(json.dumps(found))
    os._exit(0)  # the ranks may be at different collectives
