"""What test_forkserver.py has ranks do: ``--out FOLDER WHAT``."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import time
from pathlib import Path

state: list[int] = []


def wait_for_ever() -> None:
    """Its name has to be in the stacks."""
    while True:
        time.sleep(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("what", choices=("look", "die", "hang"))
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    if options.what == "die" and rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    if options.what == "hang":
        wait_for_ever()
    state.append(rank)
    report = {"state": state, "random": random.random(), "pid": os.getpid(), "parent": os.getppid()}
    (options.out / f"rank{rank}.json").write_text(json.dumps(report))
