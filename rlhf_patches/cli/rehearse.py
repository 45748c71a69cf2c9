"""``rehearse``: check a command's own training against itself at its first window of micro-batches."""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from typing import Any

from .. import settings
from ..rehearsal import html, results
from ..rehearsal.relation import OTHER_LAYOUT
from . import output, run
from .command_line import Commands, UsageError, add_command, given_command


def add(commands: Commands) -> None:
    """Declare the command."""
    command = commands.add(
        "rehearse",
        _rehearse,
        "check the gradient of a training command at its first optimizer step, then end the command",
        "rlhf-patches rehearse -- torchrun --nproc-per-node 8 train.py --config sft.yaml",
    )
    command.add_argument(
        "--without",
        action="store_true",
        help="run without the patches; if a relation deviates, run again with them and name the patch that repairs it",
    )
    command.add_argument(
        "--go-on", action="store_true", help="continue the training afterwards, with unchanged results"
    )
    command.add_argument(
        "--save",
        action="store_true",
        help="also make the first optimizer step, save a checkpoint in a temporary folder, and load it",
    )
    command.add_argument(
        "--time-limit", metavar="SECONDS", type=float, help="end a rehearsal that takes longer, with status 2"
    )
    command.add_argument(
        "--memory", choices=["low"], help="low: keep no second set of gradients; some relations are not checked"
    )
    command.add_argument(
        "--against",
        metavar="LAYOUT",
        help="also run the command in another layout, such as TP=1 or TP=1,EP=1, and compare megatron-core's gradients",
    )
    command.add_argument("--json", metavar="FILE", help="also write the results to this file")
    command.add_argument(
        "--html", metavar="FILE", help="also write a page of the first example's tokens: which are trained on"
    )
    add_command(command)


def _rehearse(options: argparse.Namespace) -> int:
    command = given_command(options, "rehearse")
    for option in ("json", "html"):
        file = getattr(options, option)
        if file and not os.path.isdir(folder := os.path.dirname(os.path.abspath(file))):
            raise UsageError(f"--{option} {file}: there is no folder {folder}")
    if options.without and options.go_on:
        raise UsageError("--without may start the command twice, and --go-on continues the training: use one of them")
    if options.save and options.go_on:
        raise UsageError(
            "--save ends the run after its first step, and --go-on continues the training: use one of them"
        )
    if options.time_limit is not None and not 0 < options.time_limit < math.inf:
        raise UsageError(f"--time-limit {options.time_limit:g}: expected a number of seconds above 0")
    if options.against is not None and options.go_on:
        raise UsageError("--against starts the command twice, and --go-on continues the training: use one of them")
    words = ["save"] * options.save + [settings.MEMORY_LOW] * (options.memory == "low")
    words += [f"time-limit={options.time_limit!r}"] if options.time_limit is not None else []
    if options.against is not None:
        try:
            words.append(settings.AGAINST + "+".join(f"{k}={v}" for k, v in settings.layout(options.against).items()))
        except settings.SettingsError as error:
            raise UsageError(f"--against: {error}") from error
    mode = "without" if options.without else "go-on" if options.go_on else "1"
    findings = _findings(command, ",".join([mode, *words]))
    if isinstance(findings, int):
        return 2
    if options.without and findings["status"] == 1:
        print("\nrlhf-patches rehearse: now with the patches", flush=True)
        repaired = _findings(command, ",".join(["1", *words]))
        if isinstance(repaired, int):
            return 2
        findings["with"] = repaired
        print("\n" + "\n".join(_comparison(findings["relations"], repaired)))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(findings, file, indent=2)
    if options.html:
        with open(options.html, "w", encoding="utf-8") as file:
            file.write(html.page(findings))
    return int(findings["ended"] if options.go_on and findings["ended"] else findings["status"])


def _findings(command: list[str], mode: str) -> Any:
    """The results of a rehearsal of the command; the command's exit status if no rehearsal took place."""
    with tempfile.TemporaryDirectory(prefix="rlhf-patches-rehearse-") as folder:
        path = os.path.join(folder, "results.json")
        os.environ[settings.PREFIX + "REHEARSE"] = mode
        os.environ[settings.PREFIX + "REHEARSED"] = path
        results.layout().mkdir()
        status = run.run(command)
        if os.path.exists(path):
            if settings.AGAINST in mode:
                _other_layout(command, mode, path)
            with open(path) as file:
                return {**json.load(file), "ended": status}
    output.complain(
        "no rehearsal: the command ended"
        + (f" with status {status}" if status else "")
        + " before a trainer or an engine that rehearse knows had taken its first micro-batches, and before a training"
        + " loop had taken a step; or a Ray worker on another node trained, whose log has the results"
    )
    return status


def _other_layout(command: list[str], mode: str, path: str) -> None:
    """Run the command in the other layout, too; what it finds is added to the first run's results."""
    if (results.layout() / results.COMPLETE).exists():
        print("\nrlhf-patches rehearse: now in the other layout", flush=True)
        os.environ[settings.PREFIX + "REHEARSE"] = f"{mode},{settings.OTHER_LAYOUT}"
        run.run(with_sizes(command, settings.against()))
    with open(path) as file:
        found = json.load(file)
    verdicts = [row["verdict"] for row in found["relations"] if row["relation"] == OTHER_LAYOUT]
    if not verdicts:
        output.complain("--against: no schedule of megatron-core trained in both layouts")
    if {*verdicts} <= {"not checked"}:
        with open(path, "w") as file:
            json.dump({**found, "status": found["status"] or 2}, file)


def with_sizes(command: list[str], layout: dict[str, int]) -> list[str]:
    """Return the command with other sizes in the options of Megatron-LM's name, if it has them."""
    sizes = {f"--{settings.PARALLEL[name].replace('_', '-')}-parallel-size": str(layout[name]) for name in layout}
    made: list[str] = []
    for word in command:
        name, equals, _ = word.partition("=")
        if equals and name.replace("_", "-") in sizes:
            word = f"{name}={sizes[name.replace('_', '-')]}"
        made.append(sizes.get(made[-1].replace("_", "-"), word) if made else word)
    return made


def _comparison(without: list[dict[str, str]], after: dict[str, Any]) -> list[str]:
    """The relations that deviate as released: which of them hold with the patches."""
    verdicts = {(row["of"], row["relation"]): row["verdict"] for row in after["relations"]}
    names = ", ".join(after["repaired"] or after["ran"])
    wrong = [(row["of"], row["relation"]) for row in without if row["verdict"] == "deviates"]
    mended = ", ".join(each[1] for each in wrong if verdicts.get(each) in ("holds", "note"))
    left = ", ".join(each[1] for each in wrong if verdicts.get(each) not in ("holds", "note"))
    lines = [f"deviates as released, holds with the patches ({names}): {mended}"] if mended else []
    return lines + ([f"deviates with the patches, too: {left}"] if left else [])
