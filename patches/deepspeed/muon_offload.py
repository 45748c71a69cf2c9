"""An advice for Muon under ZeRO-1 and ZeRO-2 with an optimizer on the CPU."""

from __future__ import annotations

from rlhf_patches import Advice, Condition, Guard, Shape, Variant

_CLASS = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
_STEP = f"{_CLASS}.step"

ADVICE = Advice(
    name="deepspeed-muon-offload",
    summary="Muon is plain SGD with ZeRO-1 or ZeRO-2 and an optimizer on the CPU",
    harm="wrong gradient",
    bug="the Muon optimizer is plain SGD with ZeRO-1 or ZeRO-2 and offload_optimizer",
    when='"optimizer": {"type": "Muon"}, ZeRO-1 or ZeRO-2, and offload_optimizer',
    excluded_by=("zero_optimization.stage=absent|0|3", "zero_optimization.offload_optimizer.device=none|absent"),
    symptom="""\
ZeRO-1 or ZeRO-2 with `"optimizer": {"type": "Muon"}` and `offload_optimizer` (`"device": "cpu"`). The loss falls, but
slowly, and `momentum` has no effect. Three steps of the tests end 0.9 of Muon's way off. No error is raised, and no
Newton-Schulz iteration runs. 0.19.3 to 0.19.7 refuse `reduce_scatter`, the default, in their message: `Muon with reduce
scatter does not support optimizer offload`. With `"reduce_scatter": false`, which the message names, they train so.""",
    cause="""\
Without offload, ZeRO computes Muon's update in `get_flat_partition`, and `MuonWithAuxAdam.step` subtracts what it
finds. With offload the gradients take another way to the optimizer, on which no release before 0.19.8 calls
`muon_update`. The bug was reproduced in 0.17.6, 0.18.2, 0.18.5, 0.18.9 and 0.19.0 to 0.19.7.""",
    what_to_do="""\
Use DeepSpeed 0.19.8. Or do not offload the optimizer: Muon has one momentum per parameter, half of Adam's state. Start
such a run again, with Muon's own learning rate, such as 0.02. Muon's step has the same size for each matrix whatever
its gradient, so a learning rate that was tuned for the bug is probably too large. A checkpoint of an affected run has
no momentum.

An affected run is reported at its first step. `deepspeed-muon-split-matrices` does not repair it, and changes nothing
in it. No patch repairs it: 0.19.8 gathers gradients and momenta of all ranks for it, in each step.""",
    references=(
        "https://github.com/deepspeedai/DeepSpeed/issues/8463",
        "https://github.com/deepspeedai/DeepSpeed/pull/8464",
    ),
    variants=(
        Variant(
            Guard("deepspeed", ">=0.17.6,<0.19.8"),
            (
                Shape(
                    target=_STEP,
                    pattern="self.unscale_and_clip_grads([single_grad_partition], scaled_global_grad_norm)",
                    matches=2,
                    unless=("self._apply_muon_updates_cpu_offload()",),
                ),
                Shape(target=f"{_CLASS}.get_flat_partition", pattern="muon_update($$$)"),  # 0.17.5 has no Muon
            ),
        ),
    ),
    obsolete_when="when the oldest DeepSpeed in use is 0.19.8",
    conditions=(Condition(_STEP, f"{__package__}._muon_conditions:is_on_the_cpu"),),
)
