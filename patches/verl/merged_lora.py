"""verl's FSDP2 engine: send the merged LoRA weights to the rollout engine, not the base model."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Variant, Wrap

_TARGET = "verl.workers.engine.fsdp.transformer_impl:FSDPEngine.get_per_tensor_param"

PATCH = Patch(
    name="verl-merged-lora",
    summary="with lora.merge=True and FSDP2 the rollout engine gets the policy, not the base model",
    harm="wrong data",
    affects_rollouts=True,
    bug="rollouts come from the base model, without the LoRA update",
    when="FSDP2 with LoRA and model.lora.merge=True",
    excluded_by=("actor_rollout_ref.model.lora.merge=false|absent",),
    symptom="""\
With `actor.strategy=fsdp2` and `model.lora.merge=True` every weight update sends the base model to the engine, without
LoRA: all rollouts come from the base model, rewards do not rise, and the gap between the trainer's log-probabilities
and the engine's (`training/rollout_probs_diff_mean`) grows with every step. There is no error. With `strategy=fsdp`, or
with adapters that are sent separately (`merge=False`), rollouts are right.""",
    cause="""\
`get_per_tensor_param` merges LoRA, calls `state_dict()`, and restores the base model before it returns an iterator over
these tensors, which are gathered one by one as the engine requests them. FSDP2's `state_dict()` makes no copies: its
tensors are the parameters, and the parameters hold the base model again.""",
    repair="""\
With LoRA, `merge` and FSDP2, the patch merges LoRA when the engine requests the first tensor, and restores the base
model after the last tensor, as in 0.9.0, or when the iterator is closed early. If a tensor shares a parameter's memory,
the patch yields a copy, which stays merged afterwards. Upstream's code, which the patch calls, decides on parameters,
offload and quantization. Runs without LoRA, with adapters that are sent separately, or with FSDP1, whose `state_dict()`
makes copies, are not affected. Not repaired: DoRA, which verl does not merge on FSDP2 or on FSDP1.""",
    changes_numbers="""\
Since verl 0.7.1, runs with FSDP2 and `lora.merge=True` were trained on samples of the base model. With the patch they
are on-policy. A resumed run continues with samples of its trained policy.""",
    references=(
        "https://github.com/verl-project/verl/issues/6782",
        "https://github.com/verl-project/verl/pull/7014",
    ),
    variants=(
        Variant(
            Guard("verl", ">=0.7.1,<0.9.0"),
            (
                Wrap(
                    _TARGET,
                    f"{__package__}._while_merged:get_per_tensor_param",
                    fingerprints={"d289539d82c97eb5": "0.7.1", "5054b59501fb8f83": "0.8.0.dev0, 0.8.0"},
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest verl in use is 0.9.0",
    conditions=(Condition(_TARGET, f"{__package__}._conditions:sends_the_base_model"),),
)
