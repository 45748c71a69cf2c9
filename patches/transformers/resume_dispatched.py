"""Resuming within an epoch with dispatch_batches: transformers 5's Trainer goes on in the order of that epoch."""

from __future__ import annotations

import sys
from typing import Any

from rlhf_patches import Guard, Patch, Rewrite, Variant


def in_its_epoch(dataloader: Any, epoch: int) -> Any:
    """``dataloader``; one that dispatches the batches of a sampler has that sampler in ``epoch``, as it is to be."""
    module = sys.modules.get("accelerate.data_loader")
    dispatcher = getattr(module, "DataLoaderDispatcher", ())
    # An iterable data set has no sampler of batches, and is told its epoch by the loader that skips.
    if isinstance(dataloader, dispatcher) and getattr(dataloader, "batch_sampler", None) is not None:
        dataloader.set_epoch(epoch)  # writes: the epoch, which Trainer sets two statements later, and 4.57.6 set here
    return dataloader


def _change(function: str, name: str, *unless: str) -> Rewrite:
    return Rewrite(
        f"transformers.trainer:Trainer.{function}",
        f"skip_first_batches({name}, steps_trained_in_current_epoch)",
        f"skip_first_batches($IN_ITS_EPOCH({name}, epoch), steps_trained_in_current_epoch)",
        alongside=(f"{name}.set_epoch(epoch)",),
        unless=unless,
        uses={"IN_ITS_EPOCH": f"{__name__}:{in_its_epoch.__name__}"},
    )


PATCH = Patch(
    name="transformers-resume-dispatched",
    summary="with dispatch_batches a run that is resumed within an epoch goes on in the order of that epoch",
    harm="wrong data",
    bug="with dispatch_batches a run that is resumed in a later epoch goes on in the first epoch's order",
    when="accelerator_config's dispatch_batches, a map-style data set, and a run resumed in an epoch after the first",
    symptom="""\
`Trainer` with `accelerator_config={"dispatch_batches": True}`, resumed in the middle of its second epoch or of a later
one: for the rest of that epoch it gets the samples in the order of epoch 0, so that some of them come twice in the
epoch and others never. No error. transformers 4's `Trainer` goes on as it should.""",
    cause="""\
Since 5.0.0 `Trainer` makes the loader that skips first, and sets the epoch of that one then. accelerate's
`DataLoaderDispatcher.set_epoch` looks for the sampler one level above where it is in a loader that skips, so nothing is
set, and the sampler stays in epoch 0.""",
    repair="""\
The epoch is set before the loader that skips is made, as transformers 4 does, where the loader is a
`DataLoaderDispatcher` with a sampler. The order of every other loader is as it was. On several ranks without
`split_batches` it takes `accelerate-resume-dispatched` too, without which too few batches are skipped. Left alone: a
sampler without a seed of its own (`use_seedable_sampler=False`).""",
    references=("https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/data_loader.py",),
    variants=(
        Variant(
            Guard("transformers", ">=5.0.0rc0,<5.3.0"),
            # 4.57.6 reads the same, and sets the epoch first.
            (_change("_inner_training_loop", "epoch_dataloader", "args.past_index >= 0"),),
        ),
        Variant(Guard("transformers", ">=5.3.0,<=5.24.0"), (_change("_run_epoch", "train_dataloader"),)),
    ),
    obsolete_when="when the oldest transformers in use has it repaired",
)
