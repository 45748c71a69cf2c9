"""The same workers as in forkserver.py, the way a user starts them: torchrun, and fresh interpreters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.harness import effort

RANK = Path(__file__).with_name("torchrun_rank.py")
Reports = list[dict[str, Any]]


def launch(
    worker: str,
    arguments: Sequence[str],
    out: Path,
    python: str = sys.executable,
    settings: Mapping[str, str] | None = None,
    ranks: int = 2,
) -> Reports:
    """Run torchrun with that many ranks; returns each rank's report.

    A training that fails is a result like any other: its report says so.

    Args:
        worker: a module with a function ``main``, which writes ``rank0.json``, ``rank1.json`` and so on into the folder
            given as ``--out``.
        arguments: of the worker.
        out: an empty folder for the reports; made if it is not there.
        python: the interpreter, by which an installed environment can be chosen.
        settings: environment variables; those of rlhf_patches that are set already are left out.
        ranks: how many.

    Raises:
        RuntimeError: the harness itself failed; the message has its output.
    """
    out.mkdir(parents=True, exist_ok=True)
    # Standalone: the launcher's own store takes a port and keeps it. One that we looked for may be taken meanwhile.
    launcher = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launcher, str(RANK), worker, "--out", str(out), *arguments]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RLHF_PATCHES_")}
    environment = {**inherited, **(settings or {})}
    before = effort.cpu_seconds()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    effort.note(f"torchrun, {ranks} ranks of {worker} {' '.join(arguments)}", effort.cpu_seconds() - before)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(ranks)]
