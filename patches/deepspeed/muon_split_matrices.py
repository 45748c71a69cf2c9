"""ZeRO-1's and ZeRO-2's Muon gets the whole mean gradient of a matrix that two ranks share."""

from __future__ import annotations

import sys
from typing import Any

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

from .. import _released

_STAGES = "deepspeed.runtime.zero.stage_1_and_2"
_MUON = "deepspeed.runtime.zero.muon.muon_optimizer"
_UPDATE = "deepspeed.runtime.zero.muon.original_muon"
_CLASS = f"{_STAGES}:DeepSpeedZeroOptimizer"
_AVERAGE = f"{_CLASS}.average_tensor"
_FUNCTIONS = (
    "reduce_ipg_grads",
    "average_tensor",
    "allreduce_and_scatter",
    "allreduce_and_copy_with_multiple_ranks",
    "allreduce_bucket",
    "allreduce_no_retain",
    "allreduce_and_copy",
    "copy_grads_in_partition",
    "get_flat_partition",
)


def needs_whole(optimizer: Any) -> bool:
    """Whether a ``DeepSpeedZeroOptimizer`` runs DeepSpeed's Muon on what its ranks have summed."""
    if optimizer.cpu_offload:  # no release of this range runs Muon on it
        return False
    # known: only classes defined in these modules have these names; a subclass defined elsewhere is a user's
    if type(optimizer.optimizer).__module__ != _MUON or type(optimizer).__module__ != _STAGES:
        return False
    # Both are compiled. A user's, which may gather a matrix itself, is in the module that calls it.
    called, released = (getattr(sys.modules.get(name), "muon_update", None) for name in (_STAGES, _UPDATE))
    return called is released and not _released.others(optimizer, *_FUNCTIONS, packages=("deepspeed",))


PATCH = Patch(
    name="deepspeed-muon-split-matrices",
    summary="ZeRO-1 and ZeRO-2 pass Muon the mean gradient of a whole matrix, also of one that two ranks share",
    harm="wrong gradient",
    bug="of a matrix that two ranks share, each rank's Muon sees the mean gradient in its own part only",
    when='"optimizer": {"type": "Muon"}, ZeRO-1 or ZeRO-2, and several ranks',
    excluded_by=("zero_optimization.stage=absent|0|3", "zero_optimization.reduce_scatter=false"),
    symptom="""\
With ZeRO-1 or ZeRO-2 and `"optimizer": {"type": "Muon"}`, training on several ranks differs from training on one, and
`"reduce_scatter": false` changes it. In the tests, with two ranks, the weights after three steps are off by 0.3 of the
way that they moved. No error is raised.""",
    cause="""\
ZeRO partitions a group of parameters without regard to where a matrix begins, so that up to one matrix per border
belongs to two ranks or more. With `reduce_scatter` (the default), a rank keeps the mean of the gradients in its own
part only. Elsewhere in the matrix it has the gradient of its own batch, divided by the number of ranks. Muon needs the
whole matrix. So each of these ranks orthogonalizes another gradient, and keeps another momentum. The more ranks there
are, the more matrices are shared. 0.19.3 has the repair.""",
    repair="""\
Each rank keeps all of the mean that it has received. The collectives, their order and their sizes stay as they were,
and no memory is added; each rank copies a whole bucket in place of its own part. A matrix that one rank has alone, and
other parameters, get the same gradient as before.

With `"use_multi_rank_bucket_allreduce": false` a rank receives its own part only. There the patch sums a bucket for all
ranks (`all_reduce` in place of one `reduce` per rank), as the default does, which transfers up to twice as much.

One rank, `"reduce_scatter": false`, `"contiguous_gradients": false` and other optimizers are not affected. The patch
does not change an optimizer on the CPU (see `deepspeed-muon-offload`), ZenFlow, a subclass of DeepSpeed's Muon or of
its ZeRO optimizer, or functions of your own in place of theirs. ZeRO-2 with accumulation also needs
`deepspeed-zero2-accumulation` up to 0.18.2. fp16 is not repaired: up to 0.19.7, ZeRO divides Muon's updates by the loss
scale, so that matrices hardly move.""",
    changes_numbers="""\
From 0.17.6 to 0.19.2, matrices that two ranks or more share moved in a direction that is partly one rank's own. With
the patch they move as on one rank. The size of Muon's step does not depend on the gradient, so a tuned learning rate
stays right. Training can continue from checkpoints: the momentum of these matrices becomes right within some steps.""",
    references=(
        "https://github.com/deepspeedai/DeepSpeed/issues/7807",
        "https://github.com/deepspeedai/DeepSpeed/pull/8141",
    ),
    variants=(
        Variant(
            Guard("deepspeed", ">=0.17.6,<0.19.3"),
            (
                Rewrite(
                    target=f"{_CLASS}.allreduce_and_copy_with_multiple_ranks",
                    pattern="dist.get_rank(group=process_group) == bucket_rank",
                    replacement="(dist.get_rank(group=process_group) == bucket_rank or $NEEDS_WHOLE(self))",
                    uses={"NEEDS_WHOLE": f"{__name__}:{needs_whole.__name__}"},
                ),
                Rewrite(
                    target=_AVERAGE,
                    pattern="self.use_multi_rank_bucket_allreduce",
                    replacement="(self.use_multi_rank_bucket_allreduce or $NEEDS_WHOLE(self))",
                    uses={"NEEDS_WHOLE": f"{__name__}:{needs_whole.__name__}"},
                    matches=3,
                ),
            ),
            where_defined=(f"{_CLASS}.get_all_grad_tensors",),  # new with Muon
        ),
    ),
    obsolete_when="when the oldest DeepSpeed in use is 0.19.3",
    conditions=(Condition(_AVERAGE, f"{__package__}._muon_conditions:averages_a_split_matrix"),),
)
