"""ms-swift's sampler of training data: the remainder when a data set is divided among the ranks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_KEPT = "_samples_of_all_ranks"


def kept(sampler: Any, samples: int) -> int:
    """The data set's size, which the sampler does not store: ``__init__`` divides it by the number of ranks."""
    # writes: our own attribute, in its `__init__`
    setattr(sampler, _KEPT, (samples, samples // sampler.world_size))
    return samples


def of_all_ranks(sampler: Any) -> int:
    """The data set's size; without its remainder if the sampler is older than the patch, or its size was changed."""
    left: int = sampler.total_samples
    size, divided = getattr(sampler, _KEPT, (0, None))
    return size if divided == left else left * sampler.world_size


def of_each_rank(sampler: Any) -> int:
    """The number of samples that a rank draws in an epoch: rounded up, or down if incomplete batches are dropped."""
    size, ranks = of_all_ranks(sampler), sampler.world_size
    whole: int = size // ranks if sampler.drop_last else -(-size // ranks)
    return whole


def evenly(sampler: Any, order: Sequence[int]) -> list[int]:
    """An epoch's order of all samples, cut or repeated so that the ranks divide it."""
    length: int = of_each_rank(sampler) * sampler.world_size
    rounds = -(-length // max(len(order), 1))
    return (list(order) * rounds)[:length]


def leaves_some_out(total_samples: Any, batch_size: Any, shuffle: Any, drop_last: Any, tp_size: Any) -> bool | None:
    """Whether a sampler leaves out the remainder of its data set, and the repair would not; None if unknown.

    If incomplete batches are dropped, the same samples may be left out by the repair: in order, or of less than a
    batch for each rank.
    """
    if not all(isinstance(each, int) for each in (total_samples, batch_size, tp_size)) or min(batch_size, tp_size) < 1:
        return None
    distributed = sys.modules.get("torch.distributed")
    grouped = distributed is not None and distributed.is_available() and distributed.is_initialized()
    ranks = distributed.get_world_size() // tp_size if distributed is not None and grouped else 1
    if ranks < 1:
        return None
    if drop_last and (not shuffle or total_samples // ranks < batch_size):
        return False
    return bool(total_samples % ranks)


_FUNCTIONS = {
    function.__name__.upper(): f"{__name__}:{function.__name__}"
    for function in (kept, of_all_ranks, of_each_rank, evenly)
}


def _changes(module: str, iteration: dict[str, str]) -> tuple[Rewrite, ...]:
    def change(method: str, pattern: str, replacement: str) -> Rewrite:
        uses = {name: function for name, function in _FUNCTIONS.items() if f"${name}(" in replacement}
        return Rewrite(
            target=f"{module}:BatchSamplerShard.{method}", pattern=pattern, replacement=replacement, uses=uses
        )

    size = "self.total_samples = {} // self.world_size"
    length = "return {} // self.batch_size"
    rounded = "({} + self.batch_size - 1)"
    whole, each = "self.total_samples", "$OF_EACH_RANK(self)"
    shuffled = "torch.randperm({}, generator=generator).tolist()"
    return (
        change("__init__", size.format("total_samples"), size.format("$KEPT(self, total_samples)")),
        change("__iter__", shuffled.format(f"{whole} * self.world_size"), shuffled.format("$OF_ALL_RANKS(self)")),
        *(change("__iter__", pattern, replacement) for pattern, replacement in iteration.items()),
        change("__len__", length.format(whole), length.format(each)),
        change("__len__", length.format(rounded.format(whole)), length.format(rounded.format(each))),
    )


# The ranks have consecutive parts.
_PARTS = {
    "start_idx = self.rank * self.total_samples": "start_idx = self.rank * $OF_EACH_RANK(self)",
    "total_idx[start_idx:start_idx + self.total_samples]": (
        "$EVENLY(self, total_idx)[start_idx:start_idx + $OF_EACH_RANK(self)]"
    ),
    "list(range(start_idx, start_idx + self.total_samples))": (
        "$EVENLY(self, range($OF_ALL_RANKS(self)))[start_idx:start_idx + $OF_EACH_RANK(self)]"
    ),
}
# The ranks take turns.
_TURNS = {
    "total_idx[self.rank::self.world_size]": "$EVENLY(self, total_idx)[self.rank::self.world_size]",
    "range(self.rank, self.total_samples * self.world_size, self.world_size)": (
        "$EVENLY(self, range($OF_ALL_RANKS(self)))[self.rank::self.world_size]"
    ),
}

PATCH = Patch(
    name="swift-sampler-tail",
    summary="every sample of the training data is drawn, for any number of ranks",
    harm="wrong data",
    bug="the last samples of the data set are never drawn",
    when="several ranks without Megatron, and a data set whose size is not a multiple of their number",
    symptom="""\
Training without Megatron on several ranks (`swift pt`, `swift sft`, DPO, KTO, reward models; not with sequence
parallelism, which has its own sampler): the last samples of the data set, at most one less than the number of
data-parallel ranks, are drawn in no epoch. With packing, these are whole packs. With fewer samples than ranks, nothing
is drawn at all. With `--group_by_length`, some ranks get one sample more than the others instead, and possibly one
batch more than their sampler's length.""",
    cause="""\
`BatchSamplerShard` divides the size of the data set by the number of data-parallel ranks, rounds down, and creates its
order for that many samples, with `--dataloader_drop_last` true or false.""",
    repair="""\
The order covers all samples. If incomplete batches are kept (the default), the order starts again for the last few
samples, so that all ranks have the same number. If they are dropped, the order is cut after the shuffle, so that each
epoch leaves out other samples. `torch.utils.data.DistributedSampler` does the same, and since 3.12.0 the samples equal
its own for the same seed. If the ranks divide the data set, nothing changes. The patch does not change a sampler that
was made before the patch, or one whose `total_samples` was set to another number after it was made.

The patch does not repair streamed data sets, which drop the last batches if there are too few for all ranks.""",
    changes_numbers="""\
Since ms-swift 3.3.0, the last samples of a data set, fewer than the number of data-parallel ranks, were never trained
on. With the patch, if the ranks do not divide the data set, an epoch has another order, one sample more per rank, and
possibly one step more. Learning rate schedules are fitted to that number of steps. A run that is resumed within an
epoch skips the same number of batches of the new order: finish that epoch with
`RLHF_PATCHES_DISABLE=swift-sampler-tail`, or resume from a checkpoint at the end of an epoch. You need not repeat any
other training.""",
    references=("https://github.com/modelscope/ms-swift/pull/9907",),
    variants=(
        Variant(Guard("ms-swift", ">=3.3.0,<3.12.0"), _changes("swift.llm.data_loader", _PARTS)),
        Variant(Guard("ms-swift", ">=3.12.0,<4.0.0"), _changes("swift.llm.data_loader", _TURNS)),
        Variant(Guard("ms-swift", ">=4.0.0,<=4.6.0"), _changes("swift.dataloader.shard", _TURNS)),
    ),
    obsolete_when="when ms-swift draws every sample (PR #9907); 4.6.0, the newest, does not",
    conditions=tuple(
        Condition(f"{module}:BatchSamplerShard.__init__", f"{__name__}:{leaves_some_out.__name__}")
        for module in ("swift.llm.data_loader", "swift.dataloader.shard")
    ),
)
