"""Outputs of the loss function: return each sample once, from one actor of every data-parallel rank."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

from rlhf_patches import Guard, Patch, Rewrite, Variant

logger = logging.getLogger("rlhf_patches")


def one_of_each_data_parallel_rank(statuses: Sequence[Any], actor_infos: Sequence[Any]) -> Sequence[Any]:
    """The status of each data-parallel rank's collecting actor, in the order of data-parallel ranks.

    All statuses, as released, where a data-parallel rank has no collecting actor or several.

    Args:
        statuses: one per actor.
        actor_infos: the actors' ``ActorInfo`` in the same order; the function reads ``rank``:
            ``is_collection_dp_rank()`` is true for one actor in each data-parallel rank.
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
        "actors with tp=0, sp=0 and the last pp have data-parallel ranks %s, expected each of %s once: the loss "
        "function returns the outputs of every actor, as released. Mesh ranks: %s",
        found,
        expected,
        ranks,
    )


PATCH = Patch(
    name="skyrl-loss-outputs-once",
    summary="loss_fn_outputs contains each sample once, with any tensor, pipeline and context parallelism",
    harm="wrong data",
    bug="loss_fn_outputs contains samples several times, so clients get other samples' outputs",
    when="two data-parallel ranks or more, with tensor, pipeline, context or sequence parallelism; Tinker API",
    symptom="""\
`WorkerDispatch.forward_backward` returns more `loss_fn_outputs` than the batch has samples. Through the Tinker API
there is no error: on two data-parallel ranks or more with tensor, context or (FSDP) sequence parallelism,
`forward_backward` returns the log-probabilities and elementwise losses of other samples, because it looks them up by
position. Quantities computed from them (the KL between sampler and trainer, losses that a user adds up) are wrong.""",
    cause="""\
SkyRL concatenates the outputs of all actors, although tensor-, pipeline- and context-parallel actors have the same part
of the batch. Six samples on two data-parallel ranks with a tensor-parallel size of 2 return as 0, 1, 2, 0, 1, 2, 3, 4,
5, 3, 4, 5. The Tinker backend then cuts the batch's padding off the end, where the padding is not, and takes the first
six. With pipeline parallelism alone these are the right ones, because of Megatron's rank order.""",
    repair="""\
Only the actor that SkyRL collects from in `forward` (`MeshRank.is_collection_dp_rank`: first tensor-, context- and
sequence-parallel rank, last pipeline stage) contributes, in the order of data-parallel ranks, as in 0.3.0. If a
data-parallel rank of the mesh has no such actor, or two, outputs are as released, with a warning. Metrics come from the
first actor, as before.

The patch does not change `forward_backward_from_staged`. It returns the first actor's status, and so the
`loss_fn_outputs` of one data-parallel rank, each once; SkyRL's trainer, the sole caller, discards them.""",
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
