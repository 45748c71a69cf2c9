"""The functions of ms-swift, Megatron-Bridge and verl that put the hooks on a config, on one rank.

``--out FOLDER reverted NAME``: entered twice as released, patched and reverted, by a reference taken before.
``--out FOLDER shared [--apply]``: verl's, with two chunks on one config.
"""

from __future__ import annotations

import argparse
import json
import traceback
from pathlib import Path
from typing import Any

import rlhf_patches
from tests.harness import framework_entries
from tests.harness import rollout_training as harness


def reverted(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """On a reference taken before apply()."""
    function = framework_entries.function(name)
    before = function.__code__
    trainee = harness.make_trainee(args, "actor", harness.make_config(), 1)
    install = getattr(framework_entries, f"install_{name}")

    tracebacks: list[str] = []

    def enter() -> str:
        try:
            install(trainee.chunks, trainee.config, trainee.optimizer, trainee.ddp_config, call=function)
        except AssertionError:
            tracebacks.append(traceback.format_exc())
            return "raises"
        return "installs" if trainee.config.no_sync_func == trainee.chunks[0].no_sync else "leaves another's"

    found: dict[str, Any] = {"released": [enter(), enter()]}
    rlhf_patches.apply()
    found["patched"] = [enter(), enter()]
    installed, trainee.config.no_sync_func = trainee.config.no_sync_func, trainee.chunks[0].zero_grad_buffer
    found["another method of the chunk"] = enter()
    trainee.config.no_sync_func = installed
    rlhf_patches.revert()
    return {**found, "reverted": enter(), "own code again": function.__code__ is before, "tracebacks": tracebacks}


def shared(args: argparse.Namespace) -> dict[str, Any]:
    """Two chunks of verl's that share a config, as virtual pipeline stages do."""
    hooks = framework_entries.function("verl")
    config = harness.make_config()
    one, two = (harness.make_trainee(args, "actor", config, seed) for seed in (1, 2))
    chunks = [*one.chunks, *two.chunks]
    try:
        hooks(chunks, one.optimizer)
    except AssertionError as error:
        return {"raised": str(error)}
    return {"installed": config.no_sync_func == [chunk.no_sync for chunk in chunks]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--apply", action="store_true")
    parser.add_argument("what", choices=("reverted", "shared"))
    parser.add_argument("name", nargs="?")
    options = parser.parse_args()
    flags = ["--apply"] if options.apply else []
    if options.what == "reverted":
        flags.append("--no-overlap-param-gather")
    args = harness.parse(["--out", str(options.out), *flags])
    harness.prepare(args)
    harness.start_megatron(args)
    report = reverted(args, options.name) if options.what == "reverted" else shared(args)
    (options.out / "rank0.json").write_text(json.dumps(report))
