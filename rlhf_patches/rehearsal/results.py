"""The results of a rehearsal, in the file that the command reads (``RLHF_PATCHES_REHEARSED``)."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from .. import settings

COMPLETE = "complete"
"""The file that says that all ranks have saved what the run in another layout needs."""


def layout() -> Path:
    """Return the folder of what the run in another layout needs, beside the results."""
    return Path(os.environ.get(f"{settings.PREFIX}REHEARSED", "")).parent / "layout"


def write_results(
    path: str, of: str, results: dict[str, Any], met: dict[str, str], ran: list[str], *, first: bool
) -> None:
    """Write results after those of the run's other engines, whose processes may write at the same time.

    Args:
        path: the file.
        of: the name of the engine or trainer.
        results: its ``status``, ``relations`` and ``trained_on``.
        met: the patches whose bug occurred.
        ran: the patches whose code ran, bug condition unknown.
        first: whether this is rank 0. On a node without rank 0, the node's first rank writes.

    Raises:
        OSError: this node does not have the file's folder.
    """
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.exists(path):
            with open(path) as file:
                before = json.load(file)
            if not first and any(row["of"] == of for row in before["relations"]):
                return
            for name in ("relations", "trained_on"):
                results[name] = [row for row in before[name] if row["of"] != of] + results[name]
            both = {before["status"], results["status"]}
            results["status"] = 1 if 1 in both else max(both)
            met, ran = {**dict.fromkeys(before["repaired"], ""), **met}, list(dict.fromkeys(before["ran"] + ran))
        with open(path, "w") as file:
            json.dump({**results, "repaired": [*met], "ran": ran}, file)
