"""Resuming within an epoch: the loader that skips batches continues in the order of that epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhf_patches import Guard, Patch, Rewrite, Variant

_TARGET = "accelerate.data_loader:skip_first_batches"


def of_its_epoch(given: Any, kind: Callable[..., Any]) -> Callable[..., Any]:
    """``kind``, whose instances are in the epoch of the ``given`` loader, which is not modified."""

    def make(*args: Any, **kwargs: Any) -> Any:
        epoch = getattr(given, "iteration", 0)
        made = kind(*args, **kwargs)
        if epoch and getattr(made, "iteration", None) == 0:
            made.iteration = epoch  # writes: a loader that was just created, and that no other code holds
        return made

    return make


PATCH = Patch(
    name="accelerate-resume-order",
    summary="a run that resumes within an epoch continues in the order of that epoch",
    harm="wrong data",
    bug="a run that resumes after its first epoch continues in the first epoch's order",
    when="transformers 4's Trainer, or a loop with skip_first_batches, and a shuffled data set with a seed",
    symptom="""\
A run resumes in the middle of its second epoch, or of a later one: for the rest of that epoch it gets the samples in
the order of epoch 0, so some samples come twice in the epoch and others never. No error. A run that resumes in its
first epoch, or between two epochs, is not affected, nor is transformers 5's `Trainer`, which sets the epoch again.""",
    cause="""\
`skip_first_batches` creates a second loader. The resuming code has called `set_epoch` of the first loader; the second
counts its epochs from 0, and sets its sampler to epoch 0 when it is iterated over.""",
    repair="""\
The loader that `skip_first_batches` creates is in the epoch of its source loader, as in 1.15.0. In epoch 0, and for
loaders that count no epochs, nothing changes. Not repaired: a loop without `set_epoch`, because its loader is
then in epoch 0; and a sampler without its own seed.""",
    references=(
        "https://github.com/huggingface/accelerate/pull/4071",
        "https://github.com/huggingface/accelerate/issues/2823",
    ),
    variants=(
        Variant(
            Guard("accelerate", ">=0.24.0,<1.15.0"),
            tuple(
                Rewrite(
                    _TARGET,
                    kind,
                    f"$OF_ITS_EPOCH(dataloader, {kind})",
                    inside=f"{kind}($$$)",
                    unless=("dataloader.iteration",),  # since 1.15.0
                    uses={"OF_ITS_EPOCH": f"{__name__}:{of_its_epoch.__name__}"},
                )
                for kind in ("DataLoaderDispatcher", "DataLoaderShard")
            ),
            # Before 0.24.0 no loader counts epochs.
            where_defined=("accelerate.data_loader:DataLoaderShard.set_epoch",),
        ),
    ),
    obsolete_when="when the oldest accelerate in use is 1.15.0",
)
