"""Runs training loops as people write them, right and wrong, whose first steps are checked."""

from __future__ import annotations

import json
import os
from typing import Any

from torch import distributed

from rlhf_patches.proving import states
from tests.patches.accelerate import loops_accelerate, loops_published, loops_rare, loops_right, loops_wrong
from tests.patches.accelerate.loops_made import (
    NOT_FOLLOWED,
    NOT_FOLLOWED_ON_RANKS,
    ON_RANKS,
    RIGHT,
    WRONG,
    WRONG_ON_RANKS,
    rehearsed,
    weights,
)

KINDS = ("right", "wrong", "not-followed", "on-ranks", "wrong-on-ranks", "not-followed-on-ranks", "go-on")
MODULES = (loops_right, loops_rare, loops_published, loops_accelerate, loops_wrong)


def main() -> None:
    parser = states.parser()
    parser.add_argument("what", choices=KINDS)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    os.chdir(options.out)
    rank = os.environ.get("RANK", "0")
    alone = os.environ["WORLD_SIZE"] == "1"
    if alone:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
    else:
        distributed.init_process_group("gloo")
    loops: dict[str, Any] = {
        "right": RIGHT,
        "wrong": {name: each[0] for name, each in WRONG.items()},
        "not-followed": {name: each[0] for name, each in NOT_FOLLOWED.items()},
        "not-followed-on-ranks": {name: each[0] for name, each in NOT_FOLLOWED_ON_RANKS.items()},
        "on-ranks": ON_RANKS,
        "wrong-on-ranks": {name: each[0] for name, each in WRONG_ON_RANKS.items()},
        "go-on": {**RIGHT, **ON_RANKS},
    }[options.what]
    chosen = {name: loops[name] for name in options.names} if options.names else loops
    if options.what == "go-on":
        found: Any = {name: [weights(each, rehearses=on) for on in (False, True)] for name, each in chosen.items()}
    else:
        found = {name: rehearsed(each) for name, each in chosen.items()}
    (options.out / f"rank{rank}.json").write_text(json.dumps(found))
