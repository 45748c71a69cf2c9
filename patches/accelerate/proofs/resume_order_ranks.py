"""The order of samples of loops and of transformers' Trainer, whole and resumed: ``--out FOLDER CASE...``.

Each case before apply() of accelerate-resume-order, or of ``--patch NAME``, after it, and after revert().
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from rlhf_patches.proving import states

NAME = "accelerate-resume-order"
ROWS, SKIPPED, EPOCHS = 24, 2, 4
CASES: dict[str, dict[str, Any]] = {
    "map": {},
    "workers": {"loader": {"num_workers": 1}},
    "split batches": {"config": {"split_batches": True}, "loader": {"batch_size": 4}},
    "iterable": {"streamed": True},
    "dispatched": {"config": {"dispatch_batches": True}},
    "dispatched, split": {"config": {"dispatch_batches": True, "split_batches": True}, "loader": {"batch_size": 4}},
    "dispatched iterable": {"config": {"dispatch_batches": True}, "streamed": True},
    "in order": {"loader": {"shuffle": False}},
    "without a seed": {"config": {"use_seedable_sampler": False}},
}


class Streamed(IterableDataset):
    """A different order in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(ROWS, generator=generator).reshape(-1, 1))


def loaded(case: str) -> tuple[Any, Any]:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed

    settings = CASES[case]
    set_seed(3)
    config = DataLoaderConfiguration(**{"use_seedable_sampler": True, **settings.get("config", {})})
    chosen = Accelerator(cpu=True, dataloader_config=config)
    given = {"batch_size": 2, **settings.get("loader", {})}
    if settings.get("streamed"):
        return chosen, chosen.prepare(DataLoader(Streamed(), **given))
    return chosen, chosen.prepare(DataLoader(torch.arange(ROWS).reshape(-1, 1), **{"shuffle": True, **given}))


def in_a_loop(case: str) -> dict[str, Any]:
    """For each epoch, the rest after some batches, and the samples of a loop that resumes there."""
    _, batches = loaded(case)
    found: dict[str, Any] = {"left": [], "resumed": [], "next": []}
    for epoch in range(EPOCHS):
        batches.set_epoch(epoch)
        found["left"].append([batch.flatten().tolist() for batch in batches][SKIPPED:])
    for epoch in range(EPOCHS):
        chosen, batches = loaded(case)
        batches.set_epoch(epoch)
        rest = chosen.skip_first_batches(batches, SKIPPED)
        found["resumed"].append([batch.flatten().tolist() for batch in rest])
        batches.set_epoch(epoch + 1)
        found["next"].append([batch.flatten().tolist() for batch in batches][SKIPPED:])
    return found


class Rows(Dataset):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, place: int) -> dict[str, Any]:
        return {"x": torch.tensor([float(place)])}


class Noting(torch.nn.Module):
    """A model that records its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[list[float]] = []

    def forward(self, x: Any, **_: Any) -> dict[str, Any]:
        self.seen.append(x.flatten().tolist())
        return {"loss": self.layer(x * 1e-3).pow(2).mean()}


def in_the_trainer() -> dict[str, Any]:
    from transformers import Trainer, TrainingArguments

    steps = ROWS // 4
    stops = [epoch * steps + SKIPPED for epoch in range(EPOCHS)]
    with tempfile.TemporaryDirectory() as folder:
        options = {"per_device_train_batch_size": 4, "num_train_epochs": EPOCHS, "report_to": [], "use_cpu": True}
        options |= {"save_strategy": "steps", "save_steps": SKIPPED, "disable_tqdm": True, "learning_rate": 1e-3}
        arguments = TrainingArguments(output_dir=folder, remove_unused_columns=False, save_safetensors=False, **options)
        whole = Noting()
        Trainer(whole, arguments, train_dataset=Rows()).train()
        found = {"left": [whole.seen[stop:] for stop in stops], "resumed": []}
        arguments.save_strategy = "no"
        for stop in stops:
            resumed = Noting()
            Trainer(resumed, arguments, train_dataset=Rows()).train(os.path.join(folder, f"checkpoint-{stop}"))
            found["resumed"].append(resumed.seen)
    return found


def main() -> None:
    parser = states.parser()
    parser.add_argument("--patch", default=NAME)
    parser.add_argument("cases", nargs="+", choices=[*CASES, "Trainer"])
    options = parser.parse_args()

    def observe() -> dict[str, Any]:
        return {case: in_the_trainer() if case == "Trainer" else in_a_loop(case) for case in options.cases}

    states.report(options.patch, observe, options.out)
