"""Resuming within an epoch with dispatch_batches on several ranks: skips as many batches as were trained on."""

from __future__ import annotations

from typing import Any

from rlhf_patches import Guard, Patch, Rewrite, Variant

from .. import _released


def of_all_ranks(dispatcher: Any, batches: Any, num_batches: int) -> int:
    """The number of the sampler's batches in ``num_batches`` steps, each of which takes one batch per rank.

    With ``split_batches``, and under tensor parallelism, a step takes one. If no batch would be left, or if that is
    unknown, the number is as released: accelerate cannot dispatch nothing.

    Args:
        dispatcher: a ``DataLoaderDispatcher``.
        batches: its batch sampler.
        num_batches: the skipped steps.
    """
    if dispatcher.split_batches or getattr(dispatcher, "submesh_tp", None) is not None:
        return num_batches
    ranks: int = dispatcher.state.num_processes
    taken = num_batches * ranks
    # With `drop_last`, batches after the last whole step are not dispatched.
    needed = ranks if getattr(dispatcher, "_drop_last", False) else 1
    try:
        return taken if taken + needed <= len(batches) else num_batches
    except Exception:
        _released.stays(
            "accelerate-resume-dispatched", "the batch sampler has no length", "the number of skipped batches"
        )
        return num_batches


PATCH = Patch(
    name="accelerate-resume-dispatched",
    summary="with dispatch_batches on several ranks a resumed epoch continues where it was interrupted",
    harm="wrong data",
    bug="a run with dispatch_batches on several ranks that resumes within an epoch repeats samples of that epoch",
    when="dispatch_batches without split_batches, a map-style data set, several ranks, and a run resumed in an epoch",
    excluded_by=(
        "num_processes=1",
        "accelerator_config.dispatch_batches=false|absent",
        "accelerator_config.split_batches=true",
    ),
    symptom="""\
With `dispatch_batches=True` on N ranks a run that resumes after K steps of an epoch continues with the samples of step
K / N: those from there to step K come twice, the epoch has more steps than remain, and a trainer that counts the
remaining steps never sees the last samples. No error. On one rank, with `split_batches=True`, and with an iterable data
set the bug does not occur.""",
    cause="""\
`skip_first_batches` skips K batches of the sampler. A step of `DataLoaderDispatcher` takes one batch per rank.""",
    repair="""\
The patch skips K batches per rank if the loader dispatches whole batches. With `split_batches`, under tensor
parallelism, where all ranks get the same batch, for iterable data sets and for every other loader nothing changes.
Nothing changes either if all batches of an epoch are skipped, since a dispatcher without a batch raises. A batch
sampler without a length is skipped as released, because nothing says where its epoch ends; rank 0 logs one warning. If
your batch sampler's length is only an upper bound of its batches, a resume at the end of an epoch can raise.

Not repaired: the samples with which accelerate fills up the last step of an epoch come from the first batch after the
resume, and not from the first batch of the epoch. This also applies to `split_batches`.

If your code already passes the number of batches of all ranks to `skip_first_batches`, pass the number of steps with
the patch.""",
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
    obsolete_when="when the oldest accelerate in use skips one batch per rank",
)
