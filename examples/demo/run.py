"""Before and after, on real frameworks: ``make demo``, or ``python examples/demo/run.py`` where they are installed.

Every row comes from a worker of the tests (tests/support), which runs a framework's own code without and with the
patches, and against a yardstick.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))
import rollout_cases
import skyrl_cases
import swift_cases
import trl_cases
from row import Row


@dataclass(frozen=True)
class Section:
    """One table: its rows are computed as they are asked for."""

    title: str
    yardstick: str
    rows: Iterator[Row]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rollouts", type=int, default=4)
    parser.add_argument(
        "--trl-python", help="the interpreter of an environment with TRL and DeepSpeed; else no such rows"
    )
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160)
    started = time.monotonic()

    def progress(what: str) -> None:
        console.print(f"[dim]{time.monotonic() - started:5.0f} s[/]  {what}", highlight=False)

    tables, repaired = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sections = [
            Section(
                f"{options.rollouts} rollouts of 3 steps, real megatron-core, 2 gloo ranks",
                "same as uninterrupted",
                rollout_cases.rows(options.rollouts, folder / "rollouts", progress),
            ),
            Section(
                "ms-swift's reference pass, and KTO on 2 gloo ranks, real megatron-core",
                "in float64",
                swift_cases.rows(folder / "swift", progress),
            ),
            Section(
                "SkyRL's log-probabilities and entropies over split vocabularies, 2 gloo ranks",
                "against SkyRL's numbers and float64",
                skyrl_cases.rows(folder / "skyrl", progress),
            ),
            Section(
                "The rest of FP8 training with SkyRL 0.2.0 (without FP8's kernels), 2 gloo ranks",
                "against SkyRL's numbers",
                skyrl_cases.fp8_rows(folder / "skyrl-fp8", progress),
            ),
        ]
        if options.trl_python:
            sections.append(
                Section(
                    "TRL's chunked loss under DeepSpeed ZeRO-3, 2 gloo ranks",
                    "same as without ZeRO-3's partitioning",
                    trl_cases.rows(options.trl_python, folder / "trl", progress),
                )
            )
        for section in sections:
            table = Table(title=section.title, show_lines=True)
            for column in ("framework", "case", "without rlhf_patches", "with rlhf_patches", section.yardstick):
                table.add_column(column, overflow="fold")
            for row in section.rows:
                repaired.append(row.repaired)
                colour = "green" if row.repaired else "bold red"
                with_patches = (f"[{colour}]{row.after}[/]", f"[{colour}]{row.verdict}[/]")
                table.add_row(row.framework, row.case, f"[red]{row.without}[/]", *with_patches)
            tables.append(table)
    for table in tables:
        console.print(table)
    console.print(f"{len(repaired)} cases, {'all repaired' if all(repaired) else 'NOT all repaired'}")
    return 0 if all(repaired) else 1


if __name__ == "__main__":
    sys.exit(main())
