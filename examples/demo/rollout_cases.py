"""The demo's rows for training that is entered once per rollout: a tiny GPT with real megatron-core on two CPU ranks.

Each case runs once without and once with the patches, in fresh processes. The yardstick is one uninterrupted run of the
same steps.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from launch import Reports, launch
from row import Row


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


def rows(rollouts: int, folder: Path, progress: Callable[[str], None]) -> Iterator[Row]:
    """Run the cases and yield their rows. Repaired: losses and all parameters bit for bit the yardstick's."""
    length = ("--rollouts", str(rollouts))
    progress("one uninterrupted run, the yardstick")
    reference = launch(("--scenario", "reference", *length), folder / "reference")
    assert reference[0]["failure"] is None, reference[0]["failure"]
    for number, case in enumerate(CASES):
        progress(f"{case.framework}: {case.title}, without and with {case.patch}")
        before = launch((*case.arguments, *length), folder / f"{number}-before")
        after = launch((*case.arguments, *length, "--apply"), folder / f"{number}-after")
        same = all(
            report["failure"] is None
            and report["losses"] == expected["losses"]
            and report["final_state"] == expected["final_state"]
            for report, expected in zip(after, reference, strict=True)
        )
        repaired = same and before[0]["failure"] is not None
        verdict = "bit for bit" if same else "NO"
        yield Row(case.framework, case.title, seen(before), seen(after), verdict, repaired)
