"""verl's other trainers, resumed: ``--out FOLDER --trainer NAME``, on one rank.

The loader, the checkpoint and `fit` are the release's. A run of PPO ends with its first batch, before the rollout;
supervised fine-tuning is as in the proof's worker.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from rlhf_patches.patches.verl.proofs import resume_epoch_ranks as sft
from rlhf_patches.proving import states

OTHERS = ("sft_trainer_ray", "fsdp_sft_trainer", "left alone", "own sampler")
PPO = {"RayPPOTrainer": "verl.trainer.ppo.ray_trainer", "PPOTrainer": "verl.trainer.main_ppo_sync"}
BATCHES = 4


def config(folder: str) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.create(
        {
            "data": {
                **{"train_batch_size": 4, "val_batch_size": 1, "dataloader_num_workers": 0, "shuffle": True, "seed": 1},
                **{"sampler": None, "train_files": [], "val_files": []},
            },
            "trainer": {
                **{"total_epochs": 2, "total_training_steps": None, "default_local_dir": folder, "logger": []},
                **{"resume_mode": "auto", "default_hdfs_dir": None, "val_before_train": False, "project_name": ""},
                **{"experiment_name": "", "del_local_ckpt_after_load": False, "save_freq": -1, "test_freq": -1},
                **{"remove_previous_ckpt_in_save": False, "max_actor_ckpt_to_keep": None},
            },
            "actor_rollout_ref": {
                "rollout": {"temperature": 1.0, "skip": {"enable": False}},
                "actor": {"checkpoint": {}},
            },
            "algorithm": {},
            "global_profiler": {"steps": None, "profile_continuous_steps": False},
        }
    )


class OwnSampler(torch.utils.data.Sampler[int]):
    """A sampler with a state of its own, which begins a new order when one is over."""

    def __init__(self, *_: Any) -> None:
        self.orders = self.yielded = 0

    def __len__(self) -> int:
        return 16

    def __iter__(self) -> Iterator[int]:
        if self.yielded == len(self):
            self.orders, self.yielded = self.orders + 1, 0
        order = torch.randperm(16, generator=torch.Generator().manual_seed(self.orders)).tolist()
        while self.yielded < len(self):
            self.yielded += 1
            yield order[self.yielded - 1]

    def state_dict(self) -> dict[str, int]:
        return {"orders": self.orders, "yielded": self.yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.orders, self.yielded = state["orders"], state["yielded"]


def trainer(kind: str, folder: str, sampler: Any = None) -> Any:
    module: Any = importlib.import_module(PPO[kind])
    if hasattr(module, "SkipManager"):
        module.SkipManager = mock.Mock()  # of 0.9: what a run leaves out, by its settings
    of_samples = lambda batch: {"index": torch.stack(batch)}  # noqa: E731
    samples = [torch.tensor(sample) for sample in range(17)]
    it = getattr(module, kind).__new__(getattr(module, kind))
    it.config, it.use_critic, it.actor_rollout_wg = config(folder), False, mock.Mock(spec=["load_checkpoint"])
    it.actor_rollout_wg.save_checkpoint = mock.Mock()
    it.tokenizer = it.processor = it.val_reward_fn = None
    it.checkpoint_manager, it._dump_executor = mock.Mock(), SimpleNamespace(_shutdown=False)
    it._start_profiling = it._shutdown_dump_executor = lambda *args: None
    if kind == "RayPPOTrainer":
        it._create_dataloader(samples, samples, of_samples, sampler)
    else:
        made: dict[str, Any] = {"create_rl_dataset": lambda *args, **kwargs: samples, "collate_fn": of_samples}
        if sampler is not None:
            made["create_rl_sampler"] = lambda *args: sampler
        with mock.patch.multiple(module, **made):
            it._init_dataloader()
    return it


def first_batch(it: Any) -> list[int] | None:
    """The first batch that `fit` trains on; None if it ends without one."""
    seen: list[list[int]] = []

    def kept(batch: Any, *rest: Any) -> None:
        seen.append((batch if isinstance(batch, dict) else batch.batch)["index"].tolist())
        raise sft.Ended

    it.step = it._get_gen_batch = kept
    with contextlib.suppress(sft.Ended):
        it.fit()
    return seen[0] if seen else None


def of_ppo(kind: str) -> dict[str, Any]:
    """The batches of two epochs, and the first batch after a checkpoint of each of the first epoch's steps."""
    it = trainer(kind, sft.fresh())
    found: dict[str, Any] = {"batches": [batch["index"].tolist() for _ in range(2) for batch in it.train_dataloader]}
    for step in (0, 3, 4, 5):
        folder = sft.fresh()
        it = trainer(kind, folder)
        if step:
            loader = (batch for _ in range(2) for batch in it.train_dataloader)
            for _ in range(step):
                next(loader)
            it.global_steps = step
            it._save_checkpoint()
        found[str(step)] = first_batch(trainer(kind, folder))
    return found


def in_one_process(module: Any) -> Any:
    """The module's loaders without the eight worker processes of these trainers, which a fork may wait for."""
    loader = module.StatefulDataLoader
    made = lambda **given: loader(**{**given, "num_workers": 0, "pin_memory": False})  # noqa: E731
    return mock.patch.object(module, "StatefulDataLoader", made)


class OfRay(sft.Model):
    """In place of the group of workers."""

    def train_batch(self, data: Any, **kwargs: Any) -> Any:
        output = super().train_batch(data)
        return SimpleNamespace(get=lambda: output)


def of_ray() -> dict[str, Any]:
    """A checkpoint in the last step of an epoch, and the run that resumes from it."""
    module: Any = importlib.import_module("verl.trainer.sft_trainer_ray")
    module.aggressive_empty_cache = module.log_gpu_memory_usage = lambda *args, **kwargs: None
    folder = sft.fresh()
    runs = ((folder, 4, OfRay(4)), (folder, -1, OfRay()), (sft.fresh(), -1, OfRay()))
    names = ("first", "resumed", "uninterrupted")
    with in_one_process(module):
        return {
            name: sft.run(module.SFTTrainer, model, sft.configured(folder, save))
            for name, (folder, save, model) in zip(names, runs, strict=True)
        }


def of_fsdp() -> dict[str, Any]:
    """The same of the trainer before the engines."""
    module: Any = importlib.import_module("verl.trainer.fsdp_sft_trainer")

    def run(folder: str, save: int, end: int | None) -> list[list[int]]:
        it = module.FSDPSFTTrainer.__new__(module.FSDPSFTTrainer)
        it.config, it.device_name, it.lora = sft.configured(folder, save), "cpu", False
        it.config.ulysses_sequence_parallel_size = 1
        it.device_mesh = mock.Mock(**{"get_rank.return_value": 0, "size.return_value": 1})
        it.checkpoint_manager = mock.Mock()
        samples = [{"input_ids": torch.full((3,), sample)} for sample in range(17)]
        with in_one_process(module):
            it._build_dataloader(samples, samples)
        it.steps_per_epoch, it.resume_global_step = len(it.train_dataloader), 0
        seen: list[list[int]] = []

        def step(batch: Any) -> dict[str, Any]:
            if len(seen) == end:
                raise sft.Ended
            seen.append([it.train_sampler.epoch, *batch["input_ids"][:, 0].tolist()])
            return {"train/time(s)": 0.0}

        it.training_step = step
        it.validation_step = lambda batch: torch.tensor(0.0)
        it.load_checkpoint()
        with contextlib.suppress(sft.Ended):
            it.fit()
        return seen

    folder = sft.fresh()
    return {"first": run(folder, 4, 4), "resumed": run(folder, -1, None), "uninterrupted": run(sft.fresh(), -1, None)}


def left_alone() -> dict[str, Any]:
    """Runs that resume where what the loader continues from is unknown, or is no end of an epoch."""
    module: Any = importlib.import_module("verl.trainer.sft_trainer")

    class Own(module.StatefulDataLoader):
        pass

    found = {}
    for name in ("no state", "other batches", "own loader", "not resumed", "finished", "no step left"):
        folder, step = sft.fresh(), 12 if name == "finished" else 4
        sft.trained(folder, step, step if step == 4 else None)
        config = sft.configured(folder, -1)
        if name == "no state":
            Path(folder, "global_step_4", "data_0.pt").unlink()
        elif name == "other batches":
            config.data.train_batch_size = 8  # two batches of the epoch, of which the state has had four
        elif name == "not resumed":
            config.trainer.resume_mode = "disable"
        elif name == "no step left":
            config.trainer.total_training_steps = 4
            config.trainer.total_epochs = 2
        loader = Own if name == "own loader" else module.StatefulDataLoader
        with mock.patch.object(module, "StatefulDataLoader", loader):
            found[name] = sft.run(module.SFTTrainer, sft.Model(), config)
    return found


def own_sampler() -> dict[str, Any]:
    """The epoch in which PPO continues, and its batch, with a sampler that begins the next order by itself."""
    folder = sft.fresh()
    it = trainer("PPOTrainer", folder, OwnSampler())
    batches = iter(it.train_dataloader)
    it.global_steps = len([next(batches) for _ in range(4)])
    it._save_checkpoint()
    seen: dict[str, Any] = {}

    def kept(batch: Any, *_: Any) -> None:
        frame: Any = sys._getframe(1)
        while "current_epoch" not in frame.f_locals:
            frame = frame.f_back
        seen.update(epoch=frame.f_locals["epoch"], batch=batch["index"].tolist())
        raise sft.Ended

    it = trainer("PPOTrainer", folder, OwnSampler())
    it.step = kept
    with contextlib.suppress(sft.Ended):
        it.fit()
    return seen


def main() -> None:
    parser = states.parser()
    parser.add_argument("--trainer", choices=[*PPO, *OTHERS])
    options = parser.parse_args()
    others = dict(zip(OTHERS, (of_ray, of_fsdp, left_alone, own_sampler), strict=True))
    torch.distributed.init_process_group("gloo")
    states.report(sft.NAME, others.get(options.trainer, lambda: of_ppo(options.trainer)), options.out)
    torch.distributed.destroy_process_group()
