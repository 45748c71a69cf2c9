"""The demo's rows for TRL: the workers of the tests (tests/support), in the environment that has TRL and DeepSpeed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from launch import WORKER, launch
from row import Row

SUPPORT = WORKER.parent


def rows(python: str, folder: Path, progress: Callable[[str], None]) -> Iterator[Row]:
    """Run the cases and yield their rows."""
    progress("TRL: the chunked loss on a partitioned head, without and with trl-chunked-nll-zero3")
    worker = SUPPORT / "chunked_nll_ranks.py"
    reports = launch(("partitioned_head", "unpatched"), folder / "loss", python, worker=worker)
    framework = f"trl {reports[0]['versions']['trl']}"
    before = [report["unpatched"] for report in reports]
    after = [report["partitioned_head"]["partitioned"] for report in reports]
    for case, without, name in (
        ("loss, head is trained", before[0]["backward"], "equal-float32"),
        ("loss, 1 chunk on one rank and 5 on the other", before[1]["stall"], "unequal-float32"),
    ):
        found = [report[name] for report in after]
        same = all(all(one["same_outputs"] + one["same_gradients"]) for one in found)
        gathers = f"{len(found[0]['forward'])} gather forward, {len(found[0]['backward'])} backward"
        yield row(framework, case, without, gathers, same)

    progress("TRL: SFTTrainer with torch_compile and LoRA, with and without trl-chunked-nll-zero3")
    worker = SUPPORT / "sft_trainer_ranks.py"
    runs = ("unpatched:lora", "patched:compiled-lora")
    reports = launch(runs, folder / "trainer", python, worker=worker)
    eager, compiled = ([report[run] for report in reports] for run in runs)
    same = all(one["logged"] == other["logged"] for one, other in zip(eager, compiled, strict=True))
    losses = " -> ".join(f"{float.fromhex(step['loss']):.3f}" for step in compiled[0]["logged"])
    try:
        (failed, *_) = launch(("unpatched:compiled-lora",), folder / "unpatched", python, worker=worker)
        without = failed["unpatched:compiled-lora"].get("failed", "")
    except RuntimeError as error:  # gloo ended the process
        without = str(error)
    case = "SFTTrainer, torch_compile, masks differ"
    yield row(framework, case, without, f"loss {losses}", same)


def row(framework: str, case: str, without: str | None, after: str, same: bool) -> Row:
    """``same``: bit for bit what the yardstick gave. ``without``: the failure, if there was one."""
    repaired = same and bool(without)
    verdict = "bit for bit" if repaired else "NO"
    return Row(framework, case, short(without or "nothing failed"), after, verdict, repaired)


def short(message: str) -> str:
    """What matters of an error message, or of a worker's output."""
    found = re.search(r"Received data size[^?]*\?[^?]*\?|Timed out waiting \w+|Connection reset by peer", message)
    return found.group().partition(". Is there a distributed")[0] if found else message.partition(". ")[0][:120]
