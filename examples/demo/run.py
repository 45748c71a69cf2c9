"""Before and after, on real frameworks: ``make demo``, or ``python examples/demo/run.py`` where they are installed.

Each case trains a tiny GPT with real megatron-core on two CPU ranks, entered once per rollout as RLHF trainers do: once
without and once with the patches, each in fresh processes. The yardstick is one uninterrupted run of the same steps.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))
import skyrl_cases
import trl_cases
from launch import Reports, launch


@dataclass(frozen=True)
class Case:
    """``stand_in`` is a function of ours in place of a framework's that is not on PyPI (tests/support/standins)."""

    title: str
    patch: str
    arguments: tuple[str, ...]
    distribution: str
    stand_in: bool = False

    @property
    def framework(self) -> str:
        if self.stand_in:
            return f"{self.distribution} (stand-in)"
        return f"{self.distribution} {importlib.metadata.version(self.distribution)}"


CASES = (
    Case(
        "training, rollout after rollout",
        "megatron-forward-pre-hook-reentry",
        ("--entry", "none-twice"),
        "megatron-core",
    ),
    Case(
        "a save between rollouts",
        "megatron-forward-pre-hook-reentry",
        ("--entry", "none-twice", "--save"),
        "megatron-core",
    ),
    Case(
        "setup_model_training per rollout",
        "swift-no-sync-reentry",
        ("--entry", "framework_entries:install_swift"),
        "ms-swift",
    ),
    Case(
        "_update_model_config_funcs per rollout",
        "megatron-bridge-no-sync-reentry",
        ("--entry", "framework_entries:install_megatron_bridge"),
        "megatron-bridge",
    ),
    Case(
        "register_megatron_training_hooks per rollout",
        "verl-no-sync-reentry",
        ("--entry", "framework_entries:install_verl"),
        "verl",
    ),
    Case("train() per rollout", "slime-no-sync-reentry", ("--entry", "slime"), "slime", True),
    Case("train() per rollout", "megatron-lm-no-sync-reentry", ("--entry", "megatron-lm"), "Megatron-LM", True),
)


def losses(reports: Reports) -> list[float]:
    return [float.fromhex(loss) for loss in reports[0]["losses"].get("actor", [])]


def seen(reports: Reports) -> str:
    """What happened, in a few words."""
    failure = reports[0]["failure"]
    if failure is None:
        measured = losses(reports)
        return f"loss {measured[0]:.3f} -> {measured[-1]:.3f}"
    message = failure["message"].splitlines()[0].partition(";")[0]
    return f"{failure['exception']} in rollout {failure['rollout']} ({failure['doing']}): {message}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rollouts", type=int, default=4)
    parser.add_argument(
        "--trl-python", help="the interpreter of an environment with TRL and DeepSpeed; else no such rows"
    )
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table(title=f"{options.rollouts} rollouts of 3 steps, real megatron-core, 2 gloo ranks", show_lines=True)
    of_trl = Table(title="TRL's chunked loss under DeepSpeed ZeRO-3, 2 gloo ranks", show_lines=True)
    of_skyrl = Table(
        title="SkyRL's log-probabilities and entropies over split vocabularies, 2 gloo ranks", show_lines=True
    )
    for one, yardstick in (
        (table, "same as uninterrupted"),
        (of_trl, "same as without ZeRO-3's partitioning"),
        (of_skyrl, "against SkyRL's numbers and float64"),
    ):
        for column in ("framework", "case", "without rlhf_patches", "with rlhf_patches", yardstick):
            one.add_column(column, overflow="fold")
    length = ("--rollouts", str(options.rollouts))
    good = True
    started = time.monotonic()

    def say(what: str) -> None:
        console.print(f"[dim]{time.monotonic() - started:5.0f} s[/]  {what}", highlight=False)

    def progress(number: int, what: str) -> None:
        say(f"{number:2d} of {2 * len(CASES) + 1}: {what}")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        progress(1, "one uninterrupted run, the yardstick")
        reference = launch(("--scenario", "reference", *length), folder / "reference")
        assert reference[0]["failure"] is None, reference[0]["failure"]
        for number, case in enumerate(CASES):  # of Megatron and what is built on it
            what = f"{case.framework}: {case.title}"
            progress(2 * number + 2, f"{what}, without")
            before = launch((*case.arguments, *length), folder / f"{number}-before")
            progress(2 * number + 3, f"{what}, with {case.patch}")
            after = launch((*case.arguments, *length, "--apply"), folder / f"{number}-after")
            same = all(
                report["failure"] is None
                and report["losses"] == expected["losses"]
                and report["final_state"] == expected["final_state"]
                for report, expected in zip(after, reference, strict=True)
            )
            good = good and same and before[0]["failure"] is not None
            verdict = "[green]bit for bit[/]" if same else "[bold red]NO[/]"
            colour = "green" if after[0]["failure"] is None else "bold red"
            table.add_row(case.framework, case.title, f"[red]{seen(before)}[/]", f"[{colour}]{seen(after)}[/]", verdict)
        count = len(CASES)
        if options.trl_python:
            for row in trl_cases.rows(options.trl_python, folder / "trl", lambda what: say(f"then: {what}")):
                count += 1
                good = good and row.repaired
                of_trl.add_row(row.framework, row.case, f"[red]{row.without}[/]", f"[green]{row.after}[/]", row.verdict)
        for line in skyrl_cases.rows(folder / "skyrl", lambda what: say(f"then: {what}")):
            count += 1
            good = good and line.repaired
            colour = "green" if line.repaired else "bold red"
            of_skyrl.add_row(
                line.framework,
                line.case,
                f"[red]{line.without}[/]",
                f"[green]{line.after}[/]",
                f"[{colour}]{line.verdict}[/]",
            )
    console.print(table)
    console.print(of_skyrl)
    if options.trl_python:
        console.print(of_trl)
    console.print(f"{count} cases, {'all repaired' if good else 'NOT all repaired'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
