"""verl's FSDP2 engine: merged LoRA is what the rollout engine gets, not the base model."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Variant, Wrap

PATCH = Patch(
    name="verl-merged-lora",
    summary="with lora.merge=True and FSDP2 the rollout engine gets the policy, and not the base model",
    harm="wrong data",
    affects_rollouts=True,
    bug="rollouts come from the base model, whatever LoRA has learned",
    when="FSDP2 with LoRA and model.lora.merge=True",
    excluded_by=("actor_rollout_ref.model.lora.merge=false|absent",),
    symptom="""\
With `actor.strategy=fsdp2` and `model.lora.merge=True` every weight update sends the engine the base model, without
LoRA: all rollouts are the base model's, rewards do not rise, and the gap between the trainer's log-probabilities and
the engine's (`training/rollout_probs_diff_mean`) grows with every step. No error. With
`strategy=fsdp`, or with adapters that are sent by themselves (`merge=False`), they are right.""",
    cause="""\
`get_per_tensor_param` merges LoRA, takes `state_dict()`, and restores the base model before it returns an iterator
over these tensors, which are gathered one by one as the engine asks for them. FSDP2's `state_dict()` makes no copies:
its tensors are the parameters, and those are the base model's again.""",
    repair="""\
With LoRA, `merge` and FSDP2, LoRA is merged when the first tensor is asked for, and the base model is restored after
the last, as in 0.9.0, or when the iterator is closed before. Nothing is copied but what is still a parameter's own
memory when it is yielded, so that it stays merged afterwards. Parameters, offload and quantization are those of
upstream's code, which is called. Without LoRA, with adapters sent by themselves, and with FSDP1, whose `state_dict()`
makes copies, nothing changes. Not repaired: DoRA, which verl merges into nothing on FSDP2 and on FSDP1.""",
    changes_numbers="""\
Since verl 0.7.1 runs with FSDP2 and `lora.merge=True` were trained on samples of the base model. With the patch they
are on-policy. A run that is resumed goes on with samples of what it has learned.""",
    references=(
        "https://github.com/verl-project/verl/issues/6782",
        "https://github.com/verl-project/verl/pull/7014",
    ),
    variants=(
        Variant(
            Guard("verl", ">=0.7.1,<0.9.0"),
            (
                Wrap(
                    "verl.workers.engine.fsdp.transformer_impl:FSDPEngine.get_per_tensor_param",
                    f"{__package__}._while_merged:get_per_tensor_param",
                    fingerprints={"d289539d82c97eb5": "0.7.1", "5054b59501fb8f83": "0.8.0.dev0, 0.8.0"},
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest verl in use is 0.9.0",
)
