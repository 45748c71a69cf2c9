"""The demo's rows for SkyRL: the worker of the tests (tests/support/skyrl_ranks.py), with the releases side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from launch import WORKER, launch
from row import Row
from side_by_side import on_path

RELEASES = ("0.2", "0.3")
CASES = {"chunked": "chunked log-probabilities", "chunked-loss": "the same, and the entropy in the loss"}


def rows(folder: Path, progress: Callable[[str], None]) -> Iterator[Row]:
    """Run the cases and yield their rows. Repaired: bit for bit, no failure, little memory in backward."""
    for release in RELEASES:
        progress(f"SkyRL {release}.0: log-probabilities and entropies, without and with the patches")
        settings = {**on_path(f"skyrl-{release}"), "TORCHDYNAMO_DISABLE": "1"}
        out = folder / release
        reports = launch(("demo",), out, settings=settings, worker=WORKER.with_name("skyrl_ranks.py"))
        for name, case in CASES.items():
            (before, after), *_ = found = [
                (report["demo"]["before"][name], report["demo"]["after"][name]) for report in reports
            ]
            repaired = all(
                after["same_log_probs"] and after["failed"] is None and after["extra_memory"][1] < 0.2
                for _, after in found
            )
            verdict = f"log-probabilities bit for bit, gradient {after['error_of_gradient']:.0e} from float64"
            yield Row(f"skyrl {release}.0", case, seen(before), seen(after), verdict, repaired)


def seen(report: dict[str, Any]) -> str:
    """What backward did, in a few words."""
    if report["failed"]:
        return report["failed"].partition(": [")[0]
    forward, backward = report["collectives"]
    memory = report["extra_memory"][1]
    return f"{forward} collectives forward, {backward} backward; backward takes {memory:.2f} x the logits' memory"
