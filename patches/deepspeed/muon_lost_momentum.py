"""ZeRO-1's and ZeRO-2's Muon keeps the momentum of every matrix."""

from __future__ import annotations

from typing import Any

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

from .. import _released

_CLASS = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
_NARROWED = "torch.narrow({}, 0, buffer_idx, tensor.numel()).view(tensor.size())"
_FUNCTIONS = ("get_flat_partition", "_get_flat_partition_unpadded")


def staged(optimizer: Any, flat: Any, index: int, start: int) -> Any:
    """The buffer of a group's momentum in this step, which is a copy of the old momentum for its first matrix.

    Args:
        optimizer: a ``DeepSpeedZeroOptimizer``.
        flat: the group's flat partition.
        index: of the group.
        start: of a matrix in the buffer.
    """
    first = start == 0 or index not in optimizer._muon_pending_momentum
    if first or _released.others(optimizer, "_muon_staging_momentum", packages=("deepspeed",)):
        return optimizer._muon_staging_momentum(flat, index)
    return optimizer._muon_pending_momentum[index][0]


PATCH = Patch(
    name="deepspeed-muon-lost-momentum",
    summary="ZeRO-1 and ZeRO-2 keep Muon's momentum of every matrix, not of a group's last one alone",
    harm="wrong gradient",
    bug="Muon forgets the momentum of all matrices but the last one in each step",
    when='"optimizer": {"type": "Muon"}, ZeRO-1 or ZeRO-2, and two matrices or more',
    excluded_by=("zero_optimization.stage=absent|0|3",),
    symptom="""\
With DeepSpeed 0.19.7, ZeRO-1 or ZeRO-2 and `"optimizer": {"type": "Muon"}`, training is noisier than with 0.19.6 or
0.19.8, and `momentum` hardly changes it. The `momentum_buffer` of the optimizer's state is 0 for every matrix of a rank
but the last one. No error is raised.""",
    cause="""\
0.19.7 computes a step's momentum in a second buffer, and keeps it if no gradient overflows. The function that returns
this buffer copies the old momentum into it, and is called for each matrix. Each call so removes the momentum of the
matrices before. Only the last one's is kept, and the others always begin at zero.""",
    repair="""\
The old momentum is copied once, for the first matrix. A group of one matrix, ZeRO-3, and training without ZeRO are not
affected. A step that overflows still leaves the momentum as it was. A `_muon_staging_momentum` of your own is called
for each matrix, as released. fp16 is not repaired: up to 0.19.7, ZeRO divides Muon's updates by the loss scale, so that
matrices hardly move.""",
    changes_numbers="""\
With the patch, momentum has the effect that it has in 0.19.6 and 0.19.8: directions are averages over steps. If you
tuned a run on 0.19.7, check its learning rate and its momentum again. Training can continue from checkpoints, whose
momentum is zero for all matrices but the last; after some steps it is right.""",
    references=("https://github.com/deepspeedai/DeepSpeed/issues/8432",),
    variants=(
        Variant(
            Guard("deepspeed", ">=0.19.7,<0.19.8"),
            tuple(
                Rewrite(
                    target=f"{_CLASS}.{function}",
                    pattern=_NARROWED.format("self._muon_staging_momentum(flatten_copy, param_group_idx)"),
                    replacement=_NARROWED.format("$STAGED(self, flatten_copy, param_group_idx, buffer_idx)"),
                    uses={"STAGED": f"{__name__}:{staged.__name__}"},
                )
                for function in _FUNCTIONS
            ),
        ),
    ),
    obsolete_when="when the oldest DeepSpeed in use is 0.19.8",
    conditions=tuple(
        Condition(f"{_CLASS}.{function}", f"{__package__}._muon_conditions:keeps_one_momentum")
        for function in _FUNCTIONS
    ),
)
