"""A run, on each of its ranks, in a fork of a process that has loaded the framework (forkserver_process.py)."""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from hunt import outcomes, trainers
from tests.harness.forkserver_process import launcher_variables

OFF, ON = "off", "on"


def main() -> None:
    """``--out FOLDER RUN``: rank 0's outcome goes into the folder, and how each rank ended, which is a result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("run", type=json.loads)
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    alone = os.environ["WORLD_SIZE"] == "1"
    if alone:  # a process that nobody launched: frameworks wrap nothing
        for name in launcher_variables(0, 1, 0):
            del os.environ[name]
    report: dict[str, Any] = {"applied": patched(options.run["patches"])}
    chosen = trainers.every()[options.run["trainer"]]
    try:
        run = functools.partial(chosen.run, **chosen.fixed, **options.run["settings"])
        outcome = importlib.import_module("hunt.rehearse").outcome(run) if options.run["rehearsed"] else run()
        if rank == 0:
            outcomes.save(outcome, options.out)
    except trainers.CannotRun as error:
        report["cannot"] = str(error)
    except Exception as error:
        traceback.print_exc()
        report["raised"] = f"{type(error).__name__}: {error}"
    report |= verdict()
    report["seconds"] = sum(os.times()[:2])
    (options.out / f"rank{rank}.json").write_text(json.dumps(report))
    if "raised" in report and not alone:
        raise SystemExit(1)  # the others may wait for this rank in a collective; now they are killed


def verdict() -> dict[str, list[str]]:
    """The patches that change results and whose bug occurred in this process; all that ran and cannot tell."""
    if "rlhf_patches" not in sys.modules:
        return {}
    import rlhf_patches

    rows = [row for row in rlhf_patches.report() if row.status == "applied"]
    unknown = [row for row in rows if row.reached and not row.was_met and row.reached.asked < row.reached.calls]
    occurred = [row.name for row in rows if row.was_met and row.changes_numbers]
    return {"occurred": occurred, "unknown": [row.name for row in unknown]}


def patched(patches: str) -> list[str]:
    """Apply no patch, every one, or the one of that name; returns the names of those that repair something here."""
    if patches == OFF:
        return []
    import rlhf_patches

    report = rlhf_patches.apply(only=None if patches == ON else [patches])
    return [row.name for row in report if row.status == "applied"]
