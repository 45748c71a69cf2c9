"""Runs cases of silent errors, faulty and right, whose first steps are checked."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from typing import Any

from torch import distributed

from rlhf_patches.proving import states
from tests.patches.accelerate.loops_made import rehearsed
from tests.patches.torch.silent_cases import CASES, Case

SAVED = "transformers-29903"


def saved(case: Case, faulty: bool) -> list[dict[str, str]]:
    """A trainer that saves."""
    from rlhf_patches.rehearsal.trainer import Ended, Rehearsal

    found: list[Any] = []

    def end(relations: Any) -> None:
        found.extend(relations)
        raise Ended(0)

    import transformers

    write = transformers.modeling_utils.safe_save_file
    trainer = case.loop(faulty)
    try:
        with Rehearsal(trainer, end, saves=True).begun(), contextlib.suppress(Ended):
            trainer.train()
    finally:
        transformers.modeling_utils.safe_save_file = write
    return [each.as_json() for each in found]


def followed(case: Case, faulty: bool) -> list[dict[str, str]]:
    """A loop."""
    return rehearsed(functools.partial(case.loop, faulty))


def main() -> None:
    parser = states.parser()
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    os.chdir(options.out)
    rank, size = os.environ.get("RANK", "0"), int(os.environ["WORLD_SIZE"])
    if size == 1:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
    else:
        distributed.init_process_group("gloo")
    found = {}
    for name in options.names:
        case = CASES[name]
        check = functools.partial(saved, case) if name == SAVED else functools.partial(followed, case)
        found[name] = [check(faulty) for faulty in (True, False)]
    (options.out / f"rank{rank}.json").write_text(json.dumps(found))
