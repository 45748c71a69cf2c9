"""The samples that each rank draws from ms-swift's training data loader.

``--out FOLDER``, with a release of ms-swift on sys.path, on any number of ranks. The trainers' own
``get_train_dataloader``, its sampler and its data loader are real. The trainer's set-up, which would load a model, is
ours. The reference is torch's DistributedSampler.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from rlhf_patches.proving import states

NAME = "swift-sampler-tail"
SEED, EPOCHS, BATCH = 5, 2, 2


class Samples(torch.utils.data.Dataset):
    """Its samples are their indices; under a name they have lengths, which `--group_by_length` reads."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, place: Any) -> Any:
        return [1 + 7 * number % 5 for number in range(self.size)] if isinstance(place, str) else place


def make_loader(size: int, shuffle: bool, drop_last: bool, grouped: bool) -> Any:
    mixin: Any = importlib.import_module("swift.trainers.mixin").DataLoaderMixin
    trainer = object.__new__(mixin)
    trainer.args = SimpleNamespace(
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        dataloader_persistent_workers=False,
        dataloader_prefetch_factor=None,
        dataloader_multiprocessing_context=None,
        dataloader_drop_last=drop_last,
        train_dataloader_shuffle=shuffle,
        data_seed=SEED,
        deepspeed=None,
        group_by_length=grouped,
        process_index=torch.distributed.get_rank(),
    )
    trainer.template = SimpleNamespace(sequence_parallel_size=1)
    trainer.train_dataset, trainer._train_batch_size, trainer.data_collator = Samples(size), BATCH, list
    trainer.accelerator = SimpleNamespace(device=None)
    return trainer.get_train_dataloader()


def drawn(size: int, shuffle: bool, drop_last: bool, grouped: bool = False, loader: Any = None) -> dict[str, Any]:
    """Each epoch's samples of this rank, and whether the number of batches equals the loader's length."""
    loader = loader or make_loader(size, shuffle, drop_last, grouped)
    torchs = DistributedSampler(Samples(size), shuffle=shuffle, seed=SEED, drop_last=drop_last)
    found: dict[str, Any] = {"samples": [], "as many batches as said": [], "as torch": []}
    for epoch in range(EPOCHS):
        for each in (loader, torchs):
            each.set_epoch(epoch)
        batches = list(loader)
        wanted = list(torchs)
        found["samples"].append([sample for batch in batches for sample in batch])
        found["as many batches as said"].append(len(batches) == len(loader))
        # The loader drops a rank's last batch if it is incomplete.
        complete = len(wanted) // BATCH * BATCH if drop_last else len(wanted)
        found["as torch"].append(found["samples"][-1] == wanted[:complete])
    return found


def observe(made_before: Any) -> dict[str, Any]:
    ranks = torch.distributed.get_world_size()
    found = {
        f"{size}, {'shuffled' if shuffle else 'in order'}, {'dropped' if drop_last else 'kept'}": drawn(
            size, shuffle, drop_last
        )
        for size in (1, 2 * ranks, *(3 * ranks + more for more in range(1, ranks)))
        for shuffle in (True, False)
        for drop_last in (True, False)
    }
    found["by length"] = drawn(3 * ranks + 1, shuffle=True, drop_last=False, grouped=True)
    limited = make_loader(3 * ranks + 1, shuffle=True, drop_last=False, grouped=False)
    limited.batch_sampler.total_samples = 2  # a user's limit
    found["limited"] = drawn(3 * ranks + 1, shuffle=True, drop_last=False, loader=limited)
    found["made before"] = drawn(3 * ranks + 1, shuffle=True, drop_last=False, loader=made_before)
    return found


def main() -> None:
    options = states.parser().parse_args()
    importlib.import_module("swift.trainers.mixin")
    torch.distributed.init_process_group("gloo")
    made_before = make_loader(3 * torch.distributed.get_world_size() + 1, shuffle=True, drop_last=False, grouped=False)
    states.report(NAME, lambda: observe(made_before), options.out)
