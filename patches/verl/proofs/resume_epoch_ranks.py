"""verl's supervised fine-tuning, ended after a checkpoint and resumed: ``--out FOLDER``, one rank or several.

The loader, the checkpoint and the loop are verl's; what stands for the model keeps the samples that it is trained on.
"""

from __future__ import annotations

import contextlib
import importlib
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from rlhf_patches.proving import states

NAME = "verl-resume-epoch"
EPOCHS, BATCHES, SAMPLES = 3, 4, 17
"""Batches of 4 samples: one of the samples is left out."""
CUTS = {"before an epoch's end": 3, "at an epoch's end": 4, "after an epoch's end": 5, "at the last epoch": 8}


class Ended(Exception):
    """The run ends here."""


class Model:
    """In place of the engine, and of the worker that trains it."""

    def __init__(self, end: int | None = None) -> None:
        self.engine, self.end = self, end
        self.trained: list[list[int]] = []
        self.trainer: Any = None

    def train_batch(self, data: Any, **kwargs: Any) -> Any:
        if self.end is not None and len(self.trained) == self.end:
            raise Ended
        samples = [int(row[0]) for row in data["input_ids"].unbind()]
        self.trained.append([self.trainer.train_sampler.epoch, *samples])
        utils: Any = importlib.import_module("verl.utils.tensordict_utils")
        return utils.get_tensordict({}, {"metrics": {"loss": 0.0, "grad_norm": 0.0, "lr": 0.0, "mfu": 0.0}})

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_data_parallel_size(self) -> int:
        return dist.get_world_size()

    def get_data_parallel_group(self) -> Any:
        return dist.group.WORLD

    def save_checkpoint(self, local_path: str, **kwargs: Any) -> None:
        Path(local_path).mkdir(parents=True, exist_ok=True)

    def __getattr__(self, name: str) -> Any:
        if name in ("load_checkpoint", "reset", "step_profile", "start_profile", "stop_profile"):
            return lambda *args, **kwargs: None
        raise AttributeError(name)


def trained(folder: str, save: int | str, end: int | None) -> list[list[int]]:
    """The epoch and the samples of each step of this rank, of a run that continues from the folder's checkpoint."""
    trainers: Any = importlib.import_module("verl.trainer.sft_trainer")
    if not torch.cuda.is_available():
        # They read a GPU's memory.
        trainers.log_gpu_memory_usage = trainers.aggressive_empty_cache = lambda *args, **kwargs: None
    return run(trainers.SFTTrainer, Model(end), configured(folder, save))


def configured(folder: str, save: int | str) -> Any:
    """The settings of a run."""
    from omegaconf import OmegaConf

    return OmegaConf.create(
        {
            "data": {
                **{"train_batch_size": SAMPLES // BATCHES, "pad_mode": "no_padding", "num_workers": 0},
                **{"use_dynamic_bsz": True, "max_token_len_per_gpu": 64, "micro_batch_size_per_gpu": 4},
            },
            "model": {"use_remove_padding": True},
            "trainer": {
                **{"device": "cpu", "total_training_steps": None, "total_epochs": EPOCHS, "save_freq": save},
                **{"test_freq": -1, "logger": [], "project_name": "", "experiment_name": ""},
                **{"default_local_dir": folder, "resume_mode": "auto", "resume_from_path": None},
                **{"max_ckpt_to_keep": None, "default_hdfs_dir": None, "balance_batch": False},
            },
        }
    )


def run(trainer: Any, model: Model, config: Any) -> list[list[int]]:
    """The steps of a run of verl's trainer."""
    it = trainer.__new__(trainer)
    it.config, it.rank, it.device_name = config, dist.get_rank(), "cpu"
    it.engine = it.training_client = model
    model.trainer = it
    it.model_config = SimpleNamespace(tokenizer=SimpleNamespace(pad_token_id=0))
    it.optimizer_config = SimpleNamespace()
    it.start_profile_step = it.end_profile_step = -1
    it.train_dataset = [
        {"input_ids": torch.full((3,), sample), "loss_mask": torch.ones(3)} for sample in range(SAMPLES)
    ]
    it.val_dataset = None
    it._build_dataloader()
    if hasattr(it, "_init_engine"):
        it._init_engine()
    it._build_ckpt_handler()
    it.resume_global_step = it.ckpt_handler.load_checkpoint()
    with contextlib.suppress(Ended):
        it.fit()
    return model.trained


def observe() -> dict[str, Any]:
    """Of each cut, what the run was trained on before and after it; and an uninterrupted run."""
    found: dict[str, Any] = {"uninterrupted": trained(fresh(), -1, None)}
    for name, step in CUTS.items():
        folder = fresh()
        save = "after_each_epoch" if step == BATCHES else step
        found[name] = {"first": trained(folder, save, step), "resumed": trained(folder, -1, None)}
    return found


def fresh() -> str:
    """A folder of all ranks."""
    made = [tempfile.mkdtemp(dir=BASE)]
    dist.broadcast_object_list(made)
    return made[0]


BASE = states.folder()


def main() -> None:
    out = states.parser().parse_args().out
    dist.init_process_group("gloo")
    states.report(NAME, observe, out)
    dist.destroy_process_group()
