"""SkyRL's trainer, resumed: ``--out FOLDER [CASE ...]``, on one rank.

The loader, the checkpoint's files and `RayPPOTrainer.train` are the release's. A run ends with its first batch, before
the rollout.

torchdata draws a seed from the sampler's generator whenever it makes an iterator. So the order of the epoch after the
one in which a run has resumed is not that of an uninterrupted run, wherever it has resumed.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import make_dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from rlhf_patches.patches.skyrl.proofs import modules
from rlhf_patches.proving import states

NAME = "skyrl-resume-epoch"
EPOCHS, BATCHES, SAMPLES = 2, 4, 17
CASES: dict[str, dict[str, Any]] = {
    "from the start": {"step": 0},
    "before an epoch's end": {"step": 3},
    "at an epoch's end": {"step": 4},
    "after an epoch's end": {"step": 5},
    "of worker processes": {"step": 4, "workers": 1},
    "after the epoch's end was seen": {"step": 4, "seen": True},
    "without a state": {"step": 4, "remove": True},
    "dynamic sampling": {"step": 4, "sampling": "filter"},
    "other batches": {"step": 4, "rows": 2},
    "own sampler": {"step": 4, "own": True},
    "finished": {"step": 8},
    "no step left": {"step": 4, "steps": 4},
}
FOLDER = states.folder()
Config = make_dataclass("Config", ["trainer", "data", "generator"])
Config.__module__ = __name__


class Ended(Exception):
    """The run ends here."""


class Samples(list[int]):
    """The data set."""

    @staticmethod
    def collate_fn(batch: list[int]) -> list[int]:
        return batch


class OwnSampler:
    """A sampler with a state of its own, which begins a new order when one is over."""

    def __init__(self) -> None:
        self.orders = self.yielded = 0

    def __len__(self) -> int:
        return 16

    def __iter__(self) -> Iterator[int]:
        if self.yielded == len(self):
            self.orders, self.yielded = self.orders + 1, 0
        while self.yielded < len(self):
            self.yielded += 1
            yield (self.yielded + self.orders) % 16

    def state_dict(self) -> dict[str, int]:
        return {"orders": self.orders, "yielded": self.yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.orders, self.yielded = state["orders"], state["yielded"]


def real(name: str) -> ModuleType:
    """A module of SkyRL of which only names are loaded otherwise."""
    root = Path(sys.modules["skyrl"].__path__[0])
    path = root.joinpath(*name.split(".")).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(f"real_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def module() -> Any:
    """The trainer's module, with the real functions for loaders, and files on this machine."""
    trainer: Any = modules.trainer()
    utils = real("train.utils.trainer_utils")
    for name in ("ResumeMode", "build_dataloader", "extract_step_from_path", "GLOBAL_STEP_PREFIX"):
        setattr(trainer, name, getattr(utils, name))
    trainer.validate_consistency_for_latest_checkpoint = mock.Mock()
    trainer.io = SimpleNamespace(exists=os.path.exists, open_file=open, makedirs=os.makedirs)
    trainer.Timer = lambda *args: contextlib.nullcontext()
    return trainer


def made(trainer: Any, folder: str, case: dict[str, Any]) -> Any:
    workers = case.get("workers", 0)
    settings = SimpleNamespace(
        **{"epochs": EPOCHS, "train_batch_size": case.get("rows", 4), "seed": 1, "ckpt_path": folder},
        **{"ckpt_interval": 1, "max_ckpts_to_keep": -1, "eval_interval": -1, "eval_before_train": False},
        **{"resume_path": None, "hf_save_interval": -1, "max_training_steps": case.get("steps")},
        critic=SimpleNamespace(model=SimpleNamespace(path=None)),
        algorithm=SimpleNamespace(use_kl_in_reward=False, dynamic_sampling=SimpleNamespace(type=case.get("sampling"))),
    )
    data = SimpleNamespace(dataloader=SimpleNamespace(num_workers=workers, persistent_workers=False))
    # 0.1.0 takes eight processes, or none with an endpoint.
    engine = SimpleNamespace(enable_http_endpoint=not workers, enable_ray_prometheus_stats=False)
    it = trainer.RayPPOTrainer.__new__(trainer.RayPPOTrainer)
    it.cfg = Config(settings, data, SimpleNamespace(inference_engine=engine))
    it.train_dataset, it.resume_mode, it.global_step = Samples(range(SAMPLES)), trainer.ResumeMode("latest"), 0
    it.dispatch, it.tokenizer, it.tracker = mock.AsyncMock(), None, mock.Mock()
    it.dispatch.save_checkpoint = it.dispatch.load_checkpoint = mock.Mock()
    it.dispatch.finalize_pending_saves, it.colocate_all = mock.Mock(), False
    it._ray_gpu_monitor = it._vllm_metrics_scraper = None
    it.all_timings, it.all_metrics = {}, {}
    it._training_control, it._fire = mock.Mock(), mock.Mock()
    it.init_weight_sync_state = it._cleanup_old_checkpoints = it._profiler_start = it._profiler_stop = mock.Mock()
    it._build_train_dataloader_and_compute_training_steps()
    if case.get("steps"):
        it.total_training_steps = case["steps"]  # 0.3.0 and 0.4.0 by max_training_steps
    if case.get("own"):
        it.train_dataloader = type(it.train_dataloader)(it.train_dataset, 4, sampler=OwnSampler(), collate_fn=list)
    if workers:
        it.train_dataloader.multiprocessing_context = "fork"  # 0.4 spawns, which a fork of a test cannot
    return it


def rest_of_the_epoch(it: Any) -> list[list[int]] | None:
    """The first batch that `train` takes, and what its loader has left of the epoch; None if it ends without one."""
    seen: list[list[int]] = []

    def kept(batch: list[int]) -> None:
        seen.append(batch)
        raise Ended

    it._remove_tail_data = kept
    it.save_checkpoints = it.save_models = mock.Mock()
    with contextlib.suppress(Ended):
        asyncio.run(it.train())
    return [*seen, *it.train_dataloader._iterator] if seen else None


def observe(cases: Iterable[str]) -> dict[str, Any]:
    """The batches of two epochs, and of each case the rest of the epoch after the checkpoint."""
    trainer = module()
    whole = made(trainer, FOLDER, {}).train_dataloader
    found: dict[str, Any] = {"batches": [batch for _ in range(EPOCHS) for batch in whole]}
    resumed = made(trainer, FOLDER, {}).train_dataloader
    next(iter(resumed))
    state = resumed.state_dict()
    resumed = made(trainer, FOLDER, {}).train_dataloader
    resumed.load_state_dict(state)
    found["batches of a resumed run"] = [batch for _ in range(EPOCHS) for batch in resumed]
    for name in cases:
        case, folder = CASES[name], tempfile.mkdtemp(dir=FOLDER)
        it = made(trainer, folder, case | {"rows": 4})
        if case["step"]:
            if case.get("seen"):
                assert len(list(it.train_dataloader)) == BATCHES
            else:
                epochs = (batch for _ in range(EPOCHS) for batch in it.train_dataloader)
                assert len(list(itertools.islice(epochs, case["step"]))) == case["step"]
            it.global_step = case["step"]
            it.save_checkpoints()
            if case.get("remove"):
                Path(folder, f"global_step_{it.global_step}", "data.pt").unlink()
        it = made(trainer, folder, case)
        found[name] = rest_of_the_epoch(it)
        found.setdefault("callbacks", {})[name] = [call.args[0] for call in it._fire.call_args_list]
    return found


def main() -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="*", default=[*CASES])
    options = parser.parse_args()
    modules.install()
    states.report(NAME, lambda: observe(options.cases), options.out)
