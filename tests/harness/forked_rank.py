"""A script as a rank of `ranks.run_forked`: on a fork of a fork server, with variables of its own; it may die."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from pathlib import Path
from typing import NoReturn

from tests.harness.forkserver_process import finish


def main() -> None:
    """The script runs in one fork more: how it ends is a result, and no failure of the rank, which reports it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("script", type=Path)
    parser.add_argument("own", type=json.loads, help="variables by rank")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    rank = os.environ["RANK"]
    pid = os.fork()
    if pid == 0:
        be(options.script, options.arguments, options.own.get(rank, {}), options.out / f"said{rank}")
    _, status = os.waitpid(pid, 0)
    report = {
        "status": os.waitstatus_to_exitcode(status),
        "output": (options.out / f"said{rank}").read_text(),
        "errors": (options.out / f"rank{rank}.log").read_text(errors="replace"),
    }
    (options.out / f"rank{rank}.json").write_text(json.dumps(report))


def be(script: Path, arguments: list[str], own: dict[str, str], output: Path) -> NoReturn:
    """What ``python SCRIPT ARGUMENTS`` with these variables does."""
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 1)
    os.environ.update(own)
    folders = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = [str(script.parent), *folders]
    sys.argv = [str(script), *arguments]
    finish(lambda: runpy.run_path(str(script), run_name="__main__"))
