"""Outputs of the loss function: each sample's once, from one rank of every data-parallel rank."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

from rlhf_patches import Guard, Patch, Rewrite, Variant

logger = logging.getLogger("rlhf_patches")


def one_of_each_data_parallel_rank(statuses: Sequence[Any], actor_infos: Sequence[Any]) -> Sequence[Any]:
    """What the collecting actor of each data-parallel rank has returned, in the order of data-parallel ranks.

    All statuses, as released, where there is a data-parallel rank of which none or several actors collect.

    Args:
        statuses: one of each actor.
        actor_infos: the actors' ``ActorInfo`` in the same order, of which ``rank`` is read: ``is_collection_dp_rank()``
            is true of one actor in each data-parallel rank.
    """
    collecting = [
        (info.rank.dp, status)
        for status, info in zip(statuses, actor_infos, strict=True)
        if info.rank.is_collection_dp_rank()
    ]
    found, expected = sorted(dp for dp, _ in collecting), list(range(actor_infos[0].rank.dp_size))
    if found != expected:
        _cannot_be_put_in_order(str(found), str(expected), str([str(info.rank) for info in actor_infos]))
        return statuses
    of_rank = dict(collecting)
    return [of_rank[dp] for dp in expected]


@functools.cache
def _cannot_be_put_in_order(found: str, expected: str, ranks: str) -> None:
    logger.warning(
        "actors with tp=0, sp=0 and the last pp have data-parallel ranks %s, expected each of %s once: the outputs of "
        "the loss function come as released, from every actor. Mesh ranks: %s",
        found,
        expected,
        ranks,
    )


PATCH = Patch(
    name="skyrl-loss-outputs-once",
    summary="loss_fn_outputs has each sample once, whatever the tensor, pipeline and context parallelism",
    harm="wrong data",
    bug="loss_fn_outputs has samples several times, so clients get those of others",
    when="two data-parallel ranks or more, with tensor, pipeline, context or sequence parallelism; Tinker API",
    symptom="""\
`WorkerDispatch.forward_backward` returns more `loss_fn_outputs` than the batch has samples. Through the Tinker API
nothing fails: on two data-parallel ranks or more with tensor, context or (FSDP) sequence parallelism,
`forward_backward` returns the log-probabilities and elementwise losses of other samples, because it looks them up by
position. What is computed from them (the KL between sampler and trainer, losses that a user adds up) is wrong.""",
    cause="""\
The outputs of all actors are concatenated, although tensor-, pipeline- and context-parallel actors have the same part
of the batch. Of six samples on two data-parallel ranks with a tensor-parallel size of 2 come 0, 1, 2, 0, 1, 2, 3, 4, 5,
3, 4, 5. The Tinker backend then cuts the batch's padding off the end, which is not where it is, and takes the first
six. With pipeline parallelism alone these are the right ones, as Megatron numbers its ranks.""",
    repair="""\
Only the actor that SkyRL collects from in `forward` (`MeshRank.is_collection_dp_rank`: first tensor-, context- and
sequence-parallel rank, last pipeline stage) contributes, in the order of data-parallel ranks, as in 0.3.0. Of a mesh
in which some data-parallel rank has no such actor, or two, outputs are as released, with a warning. Metrics are those
of the first actor, as before.

Left alone: `forward_backward_from_staged`. It returns the first actor's status, and so the `loss_fn_outputs` of one
data-parallel rank, none of them twice; SkyRL's trainer, which alone calls it, throws them away.""",
    references=("https://github.com/NovaSky-AI/SkyRL/pull/1543",),
    variants=(
        Variant(
            Guard("skyrl", ">=0.1.0,<0.3.0"),
            (
                Rewrite(
                    target="skyrl.backends.skyrl_train.workers.worker_dispatch:WorkerDispatch.forward_backward",
                    pattern="statuses",
                    inside="for $STATUS in statuses:\n    $$$BODY",
                    alongside=(
                        (
                            "refs = self._actor_groups[model].async_run_ray_method("
                            '"mesh", "forward_backward", data, **kwargs)'
                        ),
                        "statuses = ray.get(refs)",
                        'all_loss_fn_outputs.extend($STATUS.pop("loss_fn_outputs", []))',
                    ),
                    unless=("$RANK.is_collection_dp_rank()",),
                    replacement="$ONE_OF_EACH(statuses, self._actor_groups[model].actor_infos)",
                    uses={"ONE_OF_EACH": f"{__name__}:{one_of_each_data_parallel_rank.__name__}"},
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest SkyRL in use is 0.3.0",
)
