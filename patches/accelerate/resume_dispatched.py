"""Resuming within an epoch with dispatch_batches on several ranks: as many batches are skipped as were trained on."""

from __future__ import annotations

from typing import Any

from rlhf_patches import Guard, Patch, Rewrite, Variant


def of_all_ranks(dispatcher: Any, batches: Any, num_batches: int) -> int:
    """How many of the sampler's batches went into ``num_batches`` steps, of which each takes one for every rank.

    With ``split_batches``, and under tensor parallelism, a step takes one. Where none would be left it is as released:
    accelerate cannot dispatch nothing.

    Args:
        dispatcher: a ``DataLoaderDispatcher``.
        batches: its sampler of batches.
        num_batches: the steps that are left out.
    """
    if dispatcher.split_batches or getattr(dispatcher, "submesh_tp", None) is not None:
        return num_batches
    ranks: int = dispatcher.state.num_processes
    taken = num_batches * ranks
    # Of what is left after the last whole step nothing is dispatched with `drop_last`.
    needed = ranks if getattr(dispatcher, "_drop_last", False) else 1
    try:
        return taken if taken + needed <= len(batches) else num_batches
    except Exception:  # a sampler without a length
        return taken


PATCH = Patch(
    name="accelerate-resume-dispatched",
    summary="with dispatch_batches on several ranks a resumed epoch goes on where it was left",
    harm="wrong data",
    bug="a run with dispatch_batches on several ranks that is resumed within an epoch repeats samples of it",
    when="dispatch_batches without split_batches, a map-style data set, several ranks, and a run resumed in an epoch",
    symptom="""\
With `dispatch_batches=True` on N ranks a run that is resumed after K steps of an epoch goes on with the samples of step
K / N: those up to step K come twice, the epoch has more steps than are left of it, and what a trainer that counts them
stops before is never seen. No error. On one rank, with `split_batches=True`, and with an iterable data set it is
right.""",
    cause="""\
`skip_first_batches` leaves out K batches of the sampler. A step of `DataLoaderDispatcher` takes one for each rank.""",
    repair="""\
K batches for each rank are left out where the loader dispatches whole batches. With `split_batches`, under tensor
parallelism, where all ranks get the same batch, for iterable data sets and for every other loader it is as it was; and
so it is where all batches of an epoch are left out, since a dispatcher without a batch raises.

Who gives `skip_first_batches` that many batches for each rank himself has to give it the number of steps with the
patch.""",
    references=("https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/data_loader.py",),
    variants=(
        Variant(
            Guard("accelerate", ">=0.16.0,<=1.15.0"),
            (
                Rewrite(
                    "accelerate.data_loader:skip_first_batches",
                    "SkipBatchSampler(batch_sampler, skip_batches=num_batches)",
                    "SkipBatchSampler(batch_sampler, "
                    "skip_batches=$OF_ALL_RANKS(dataloader, batch_sampler, num_batches) "
                    "if isinstance(dataloader, DataLoaderDispatcher) else num_batches)",
                    uses={"OF_ALL_RANKS": f"{__name__}:{of_all_ranks.__name__}"},
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest accelerate in use has it repaired",
)
