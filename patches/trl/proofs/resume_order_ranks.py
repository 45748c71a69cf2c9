"""Uninterrupted runs of TRL's trainers, and runs resumed from their checkpoints: ``--out FOLDER CASE...``.

Each case before apply() of trl-resume-order and after it, the first one after revert() too.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

from rlhf_patches.patches.trl.proofs import small
from rlhf_patches.proving import states

NAME = "trl-resume-order"
PROMPTS = [f"w{2 * row + 1} w{2 * row + 2}" for row in range(6)]

REUSING = {"steps_per_generation": 2, "num_iterations": 2}
"""Each generation serves two steps, twice: an epoch of six prompts, two at a time, has twelve steps."""
CASES: dict[str, tuple[str, int, tuple[int, ...], dict[str, Any]]] = {
    "GRPO": ("GRPO", 18, (8, 14), {}),
    "GRPO reusing": ("GRPO", 24, (16,), REUSING),
    "GRPO accumulating": ("GRPO", 9, (4,), {"gradient_accumulation_steps": 2, "steps_per_generation": 1}),
    "GRPO in order": ("GRPO", 12, (8,), {"shuffle_dataset": False}),
    "GRPO from an epoch's start": ("GRPO", 12, (8,), {"ignore_data_skip": True}),
    "GRPO workers": ("GRPO", 12, (8,), {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}),
    "GRPO in the first epoch": ("GRPO", 9, (3,), {}),
    "GRPO twice": ("GRPO", 12, (8,), {}),
    "GRPO on ranks": ("GRPO", 6, (4,), {}),
    "RLOO": ("RLOO", 12, (6,), {}),
}
"""Trainer, steps, the steps after which a run resumes, and settings. An epoch has six steps, on two ranks three."""

SETTINGS: dict[str, Any] = {"learning_rate": 0.1, "save_strategy": "steps", "save_steps": 1000}
SETTINGS |= {"logging_steps": 1000, "max_completion_length": 2}


class Saves(transformers.TrainerCallback):
    """Saves after these steps, and evaluates after the ninth."""

    def __init__(self, steps: tuple[int, ...]) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save = state.global_step in self.steps
        control.should_evaluate = state.global_step == 9


class Run:
    """A trainer, and the samples that it has seen."""

    def __init__(self, case: str, folder: Path) -> None:
        kind, steps, saved, settings = CASES[case]
        self.trained: list[tuple[int, str]] = []
        self.evaluated: list[str] = []
        chosen = {**SETTINGS, "max_steps": steps, **settings}
        self.trainer = small.rollouts(kind, folder, [self.reward], PROMPTS, **chosen)
        self.trainer.eval_dataset = self.trainer.train_dataset
        self.trainer.add_callback(Saves(saved))

    def reward(self, prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        if self.trainer.model.training:
            self.trained += [(self.trainer.state.global_step, prompt) for prompt in prompts[::2]]
        else:
            self.evaluated += prompts[::2]
        return [float(sum(map(ord, completion)) % 7) for completion in completions]

    def train(self, resumed: str | None = None) -> dict[str, Any]:
        self.trained.clear()
        self.trainer.train(resume_from_checkpoint=resumed)
        return self.found()

    def found(self) -> dict[str, Any]:
        weights = torch.cat([each.detach().flatten() for each in self.trainer.model.parameters()])
        return {
            "trained": list(self.trained),
            "evaluated": list(self.evaluated),
            "weights": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
            "attributes": sorted(vars(self.trainer.callback_handler.train_dataloader)),
        }


def observed(case: str) -> dict[str, Any]:
    """An uninterrupted run; by step, the run that resumes after it; and the same trainer once more."""
    folder = Path(os.environ.get("SHARED") or states.folder())
    run = Run(case, folder)
    found: dict[str, Any] = {"whole": run.train()}
    for step in CASES[case][2]:
        found[str(step)] = Run(case, folder).train(str(folder / "trainer" / f"checkpoint-{step}"))
    if case == "GRPO twice":
        found["again"] = run.train()
        loader = run.trainer.get_train_dataloader()  # for code that looks at the data afterwards
        found["looked at"] = [batch[0]["prompt"] for batch in loader]
    if int(os.environ["RANK"]) == 0:
        shutil.rmtree(folder)
    return found


def main() -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="+")
    options = parser.parse_args()
    if int(os.environ["WORLD_SIZE"]) > 1:
        os.environ["SHARED"] = str(options.out / "shared")
    first = iter([True, True])

    def observe() -> dict[str, Any]:
        cases = options.cases if next(first, False) else options.cases[:1]
        return {case: observed(case) for case in cases}

    states.report(NAME, observe, options.out)
