"""Resuming within an epoch with dispatch_batches: transformers 5's Trainer continues in the order of that epoch."""

from __future__ import annotations

import sys
from typing import Any

import rlhf_patches
from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_NAME = "transformers-resume-dispatched"
_LOOP, _EPOCH = "transformers.trainer:Trainer._inner_training_loop", "transformers.trainer:Trainer._run_epoch"


def in_its_epoch(dataloader: Any, epoch: int) -> Any:
    """``dataloader``; if it dispatches the batches of a sampler, that sampler is set to ``epoch`` first."""
    module = sys.modules.get("accelerate.data_loader")
    dispatcher = getattr(module, "DataLoaderDispatcher", ())
    # An iterable data set has no batch sampler, and gets its epoch from the loader that skips.
    has_sampler = isinstance(dataloader, dispatcher) and getattr(dataloader, "batch_sampler", None) is not None
    rlhf_patches.decided(_NAME, has_sampler and epoch > 0)
    if has_sampler:
        dataloader.set_epoch(epoch)  # writes: the epoch, which Trainer sets two statements later, and 4.57.6 sets here
    return dataloader


def _change(target: str, name: str, *unless: str) -> Rewrite:
    return Rewrite(
        target,
        f"skip_first_batches({name}, steps_trained_in_current_epoch)",
        f"skip_first_batches($IN_ITS_EPOCH({name}, epoch), steps_trained_in_current_epoch)",
        alongside=(f"{name}.set_epoch(epoch)",),
        unless=unless,
        uses={"IN_ITS_EPOCH": f"{__name__}:{in_its_epoch.__name__}"},
    )


PATCH = Patch(
    name=_NAME,
    summary="with dispatch_batches a run that resumes within an epoch continues in the order of that epoch",
    harm="wrong data",
    bug="with dispatch_batches a run that resumes in a later epoch continues in the first epoch's order",
    when="accelerator_config's dispatch_batches, a map-style data set, and a run that resumes after the first epoch",
    excluded_by=("accelerator_config.dispatch_batches=false|absent",),
    symptom="""\
`Trainer` with `accelerator_config={"dispatch_batches": True}`, resumed in the middle of its second epoch or a later
one: for the rest of that epoch the run gets the samples in the order of epoch 0, so some samples come twice in the
epoch and others never. No error. transformers 4's `Trainer` is not affected.""",
    cause="""\
Since 5.0.0 `Trainer` first creates the loader that skips, and then sets that loader's epoch. accelerate's
`DataLoaderDispatcher.set_epoch` looks for the sampler one level above its place in a loader that skips, so it sets
nothing, and the sampler stays in epoch 0.""",
    repair="""\
The patch sets the epoch before `Trainer` creates the loader that skips, as transformers 4 does, if the loader is a
`DataLoaderDispatcher` with a sampler. The order of every other loader is unchanged. On several ranks without
`split_batches` `accelerate-resume-dispatched` is needed too; without it too few batches are skipped. Not repaired: a
sampler without its own seed (`use_seedable_sampler=False`).""",
    references=("https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/data_loader.py",),
    variants=(
        Variant(
            Guard("transformers", ">=5.0.0rc0,<5.3.0"),
            # 4.57.6 has the same text, and sets the epoch first.
            (_change(_LOOP, "epoch_dataloader", "args.past_index >= 0"),),
        ),
        Variant(Guard("transformers", ">=5.3.0,<=5.24.0"), (_change(_EPOCH, "train_dataloader"),)),
    ),
    obsolete_when="when the oldest transformers in use sets the epoch before it creates the loader that skips",
    conditions=(
        Condition(_LOOP, f"{__package__}._conditions:from_a_checkpoint"),
        Condition(_EPOCH, f"{__package__}._conditions:within_an_epoch"),
    ),
)
