"""Outputs of the loss function: return them in the order of the samples, where micro-batches are packed by tokens."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

from rlhf_patches import Guard, Patch, Rewrite, Variant

logger = logging.getLogger("rlhf_patches")


def in_order_of_samples(outputs: Sequence[Sequence[Any]], iterator: Any) -> list[Any]:
    """Each sample's output once, in the order of the iterator's batch.

    Args:
        outputs: for each micro-batch, the outputs of its samples and then, with Megatron, of the rows that fill it up;
            empty where the rank has none (a pipeline stage before the last). Micro-batches of pure padding come last.
        iterator: SkyRL's `TokenBasedBatchIterator`, whose `_microbatches` are the samples of each micro-batch; or
            another iterator, or None, for micro-batches in the order of samples.

    Returns:
        As released, micro-batch by micro-batch, where they are in the order of samples, or a sample has no output.
    """
    one_after_another = [output for micro_batch in outputs for output in micro_batch]
    packed: list[list[int]] | None = getattr(iterator, "_microbatches", None)
    if packed is None or not any(outputs):
        return one_after_another
    of_sample = {
        sample: output
        for samples, micro_batch in zip(packed, outputs, strict=False)
        for sample, output in zip(samples, micro_batch, strict=False)
    }
    expected = sum(map(len, packed))
    if len(of_sample) != expected:
        sizes = [len(samples) for samples in packed], [len(found) for found in outputs]
        _cannot_be_put_in_order(f"{len(of_sample)} samples, expected {expected}", *map(str, sizes))
        return one_after_another
    return [of_sample[sample] for sample in range(expected)]


@functools.cache
def _cannot_be_put_in_order(samples: str, packed: str, found: str) -> None:
    logger.warning(
        "the loss function has outputs of %s: micro-batches of %s samples have %s outputs, which cannot be ordered; "
        "the order stays as released",
        samples,
        packed,
        found,
    )


_WORKERS = "skyrl.backends.skyrl_train.workers"


def _rewrites(target: str, result: str) -> tuple[Rewrite, ...]:
    """Collect outputs by micro-batch, and combine them at the end."""
    return (
        Rewrite(
            target=target,
            pattern='all_loss_fn_outputs.extend(metrics.pop("loss_fn_outputs"))',
            replacement='all_loss_fn_outputs.append(metrics.pop("loss_fn_outputs"))',
            alongside=("microbatch_iterator = get_microbatch_iterator($$$ARGUMENTS)",),
            unless=("$ITERATOR.reorder_and_combine_items($$$ARGUMENTS)",),
        ),
        Rewrite(
            target=target,
            pattern=f"WorkerOutput(loss_fn_outputs=all_loss_fn_outputs, metrics={result})",
            replacement=(
                f"WorkerOutput(loss_fn_outputs=$IN_ORDER(all_loss_fn_outputs, microbatch_iterator), metrics={result})"
            ),
            uses={"IN_ORDER": f"{__name__}:{in_order_of_samples.__name__}"},
        ),
    )


PATCH = Patch(
    name="skyrl-loss-outputs-packed",
    summary="with max_tokens_per_microbatch, loss_fn_outputs are in the order of the samples",
    harm="wrong data",
    bug="loss_fn_outputs are not in the order of the samples",
    when="trainer.max_tokens_per_microbatch and the Tinker API",
    symptom="""\
With `trainer.max_tokens_per_microbatch` there is no error, and a client of the Tinker API that calls `forward_backward`
gets the log-probabilities and elementwise losses of other samples: the KL between sampler and trainer, and losses and
weights that the client computes from them, are wrong. Where lengths differ, arrays do not fit the client's masks.""",
    cause="""\
SkyRL packs samples into micro-batches by their number of tokens, and `forward_backward` returns the outputs of one
micro-batch after another. `WorkerOutput.loss_fn_outputs` are looked up by position. With Megatron, the outputs also
contain the rows that fill micro-batches up to the largest one. With both backends they contain the micro-batches of
padding that a data-parallel rank runs because another rank has more; these shift all samples of the ranks that follow.
Training is not affected: loss and gradients do not depend on the order.""",
    repair="""\
The patch collects outputs by micro-batch, orders them by the indices that the iterator packed, and drops padding, as in
0.4.0. Without `max_tokens_per_microbatch` the outputs are unchanged. Where a sample has no output, the order stays as
released, with a warning.""",
    references=(
        "https://github.com/NovaSky-AI/SkyRL/issues/1865",
        "https://github.com/NovaSky-AI/SkyRL/pull/1882",
        "https://github.com/NovaSky-AI/SkyRL/pull/2043",
    ),
    variants=(
        Variant(
            Guard("skyrl", "==0.3.0"),
            (
                *_rewrites(f"{_WORKERS}.worker:PolicyWorkerBase.forward_backward", "result"),
                *_rewrites(f"{_WORKERS}.megatron.megatron_worker:MegatronPolicyWorkerBase.forward_backward", "status"),
            ),
            independent=True,  # a run with FSDP imports the first only
        ),
    ),
    obsolete_when="when the oldest SkyRL in use is 0.4.0",
)
