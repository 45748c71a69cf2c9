"""``rehearse``: a command's own training, held against itself at its first window of micro-batches."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from typing import Any

from .. import settings
from . import output, run
from .command_line import Commands, UsageError, add_command, given_command


def add(commands: Commands) -> None:
    """Declare the command."""
    command = commands.add(
        "rehearse",
        _rehearse,
        "hold a command's own training against itself before its first optimizer step, then end it",
        "rlhf-patches rehearse -- torchrun --nproc-per-node 8 train.py --config sft.yaml",
    )
    command.add_argument(
        "--without", action="store_true", help="without the patches; says of what deviates which of them makes it hold"
    )
    command.add_argument("--go-on", action="store_true", help="train afterwards, as if nothing had been")
    command.add_argument("--json", metavar="FILE", help="write what was found to this file, too")
    add_command(command)


def _rehearse(options: argparse.Namespace) -> int:
    command = given_command(options, "rehearse")
    if options.json and not os.path.isdir(os.path.dirname(os.path.abspath(options.json))):
        raise UsageError(f"--json {options.json}: there is no folder {os.path.dirname(os.path.abspath(options.json))}")
    if options.without and options.go_on:
        raise UsageError("--without may start the command twice; --go-on trains. Use one of them")
    found = _found(command, "without" if options.without else "go-on" if options.go_on else "1")
    if isinstance(found, int):
        return 2
    if options.without and found["status"] == 1:
        print("\nrlhf-patches rehearse: the same with the patches", flush=True)
        repaired = _found(command, "1")
        if isinstance(repaired, int):
            return 2
        found["with"] = repaired
        print("\n" + "\n".join(_named(found["relations"], repaired)))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=2)
    return int(found["ended"] if options.go_on and found["ended"] else found["status"])


def _found(command: list[str], mode: str) -> Any:
    """What a rehearsal of the command has found; the command's status where there was none."""
    with tempfile.TemporaryDirectory(prefix="rlhf-patches-rehearse-") as folder:
        path = os.path.join(folder, "found.json")
        os.environ[settings.PREFIX + "REHEARSE"] = mode
        os.environ[settings.PREFIX + "REHEARSED"] = path
        status = run.run(command)
        if os.path.exists(path):
            with open(path) as file:
                return {**json.load(file), "ended": status}
    output.complain(
        "no rehearsal: the command ended"
        + (f" with status {status}" if status else "")
        + " before a transformers.Trainer had taken its first window of micro-batches"
    )
    return status


def _named(without: list[dict[str, str]], after: dict[str, Any]) -> list[str]:
    """Which of what deviates as released holds with the patches."""
    verdicts = {row["relation"]: row["verdict"] for row in after["relations"]}
    names = ", ".join(after["repaired"] or after["ran"])
    wrong = [row["relation"] for row in without if row["verdict"] == "deviates"]
    mended = [each for each in wrong if verdicts.get(each) in ("holds", "note")]
    left = [each for each in wrong if each not in mended]
    said = [f"as released it deviates, with the patches it holds ({names}): {', '.join(mended)}"] if mended else []
    return said + ([f"it deviates with the patches too: {', '.join(left)}"] if left else [])
