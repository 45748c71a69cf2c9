"""DeepSpeed's Muon orthogonalizes its updates without ZeRO, too."""

from __future__ import annotations

import sys
from typing import Any

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_MODULE = "deepspeed.runtime.zero.muon.muon_optimizer"
_STEP = f"{_MODULE}:MuonWithAuxAdam.step"


def update(optimizer: Any, param: Any, group: dict[str, Any]) -> Any:
    """What a step subtracts from a parameter, times the learning rate.

    It is the gradient for a flat partition, into which a ZeRO optimizer has written Muon's update. A matrix has come
    past none, and gets Muon's update here, by the release's own function.

    Args:
        optimizer: a ``MuonWithAuxAdam``.
        param: a parameter with a gradient.
        group: its group.
    """
    gradient = param.grad
    # known: only a class defined in that module has this name; a subclass defined elsewhere is a user's
    if gradient is None or param.dim() < 2 or type(optimizer).__module__ != _MODULE:
        return gradient
    state = optimizer.state[param]
    if "momentum_buffer" not in state:
        # writes: Muon's momentum, under the name that 0.19.7 and ZeRO's optimizers use
        state["momentum_buffer"] = param.new_zeros(param.shape)
    more = {"ns_method": group["ns_method"]} if "ns_method" in group else {}  # 0.19.0 and later
    if getattr(param, "is_expert_group", False):  # 0.19.2 and later
        more["is_expert_group"] = True
    muon: Any = sys.modules["deepspeed.runtime.zero.muon.original_muon"]
    # It computes in its argument's memory, and the gradient is the user's. It needs rows one after another.
    own = gradient.to(param.dtype, copy=True).contiguous()
    return muon.muon_update(own, state["momentum_buffer"], beta=group["momentum"], **more)


PATCH = Patch(
    name="deepspeed-muon-without-zero",
    summary="the Muon optimizer is Muon without ZeRO, too",
    harm="wrong gradient",
    bug="the Muon optimizer is plain SGD without ZeRO",
    when='"optimizer": {"type": "Muon"} without ZeRO: no zero_optimization, or stage 0, its default',
    excluded_by=("zero_optimization.stage=1|2|3",),
    symptom="""\
A DeepSpeed configuration has `"optimizer": {"type": "Muon"}` and no `zero_optimization`, or stage 0. The loss falls,
but slowly, and `momentum` has no effect. No error is raised, and no Newton-Schulz iteration runs. Three steps of the
tests moved the weights 0.2 times as far as Muon does, in another direction.""",
    cause="""\
`MuonWithAuxAdam.step` subtracts the gradient of its matrices times the learning rate. ZeRO's optimizers write Muon's
update into the gradient before they call it. Without ZeRO nothing does so, in float32, bfloat16 or float16. The bug was
reproduced in 0.17.6, 0.18.2, 0.18.5, 0.18.9 and 0.19.6; 0.19.7 has the repair.""",
    repair="""\
For a parameter that is a matrix, the step computes Muon's update with the release's own `muon_update`, as 0.19.7 does.
The momentum is in the optimizer's state as `momentum_buffer`. A checkpoint with it loads without the patch, which
ignores it, and in 0.19.7. A checkpoint without it loads with the patch: the momentum begins at zero.

Flat partitions, which ZeRO's optimizers pass, only ever get their own gradient subtracted, as released. The gradients
stay as they were. The patch does not change a subclass of your own. If your code writes an orthogonalized update into
the gradients itself, disable the patch, or remove that code.

The patch does not repair bfloat16 with `"grad_accum_dtype": "fp32"` without ZeRO or with stage 1, whose optimizer
passes flat partitions without Muon's update.""",
    changes_numbers="""\
From 0.17.6 to 0.19.6, Muon without ZeRO was SGD without momentum. Muon's step has the same size for each matrix
whatever its gradient, so a learning rate that was tuned for the bug is probably too large: begin again from Muon's own,
such as 0.02. A run in progress may go on from its checkpoint with the new learning rate, or finish with the patch
disabled.""",
    references=(
        "https://github.com/deepspeedai/DeepSpeed/issues/8441",
        "https://github.com/deepspeedai/DeepSpeed/pull/8442",
    ),
    variants=(
        Variant(
            Guard("deepspeed", ">=0.17.6,<0.19.7"),
            (
                Rewrite(
                    target=_STEP,
                    pattern='p.add_(p.grad.reshape(p.shape), alpha=-group["lr"])',
                    replacement='p.add_($UPDATE(self, p, group).reshape(p.shape), alpha=-group["lr"])',
                    uses={"UPDATE": f"{__name__}:{update.__name__}"},
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest DeepSpeed in use is 0.19.7",
    conditions=(Condition(_STEP, f"{__package__}._muon_conditions:has_matrices"),),
)
