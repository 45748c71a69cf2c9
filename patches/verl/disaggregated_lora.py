"""An advice for LoRA whose adapter is not sent to rollout engines on other GPUs."""

from __future__ import annotations

from rlhf_patches import Advice, Condition, Guard, Shape, Variant

_TARGET = "verl.workers.engine_workers:ActorRolloutRefWorker.update_weights"

ADVICE = Advice(
    name="verl-disaggregated-lora",
    summary="rollout engines on GPUs of their own never get the LoRA adapter, unless it is merged",
    harm="wrong data",
    affects_rollouts=True,
    bug="rollouts come from the base model, without the LoRA update",
    when="LoRA without model.lora.merge=True, and a checkpoint_engine.backend other than naive (asynchronous training)",
    excluded_by=(
        "actor_rollout_ref.model.lora.merge=true",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=naive",
    ),
    symptom="""\
Asynchronous training, whose rollout engines have GPUs of their own, with LoRA and `model.lora.merge=False` (the
default): each weight update sends the base model only, and the adapter never. All rollouts come from the base model,
rewards do not rise, and the gap between the trainer's log-probabilities and the engine's grows with every step. There
is no error: verl's server asks vLLM for the adapter only if the engine has one.""",
    cause="""\
With a backend other than `naive`, `update_weights` calls `get_per_tensor_param()` with its defaults, which gives the
base model's weights and the adapter's configuration, and drops the configuration. The receiving side,
`CheckpointEngineWorker.update_weights`, loads what arrives as weights of the base model. Only the `naive` path has a
second update for the adapter. Reproduced with FSDP2 and FSDP1 in 0.7.1, 0.8.0 and 0.9.1, up to what is sent.""",
    what_to_do="""\
Set `actor_rollout_ref.model.lora.merge=True`: the merged weights are sent. With FSDP2, 0.7.1 and 0.8.0 also need
`verl-merged-lora`, which is on by default. Discard checkpoints of an affected run, or go on from them as from a policy
that was trained on another policy's samples.

An affected run of FSDP is reported at its first weight update. Megatron's workers, and the backend `delta_sharded`, are
not reported.""",
    references=(
        "https://github.com/verl-project/verl/issues/7495",
        "https://github.com/verl-project/verl/pull/7496",
    ),
    variants=(
        Variant(
            Guard("verl", ">=0.7.1,<=0.9.1"),
            (
                Shape(
                    target=_TARGET,
                    pattern="per_tensor_param, _ = self.actor.engine.get_per_tensor_param()",
                    alongside=("await self.rollout.update_weights($$$, base_sync_done=True, $$$)",),
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest verl in use sends the adapter; 0.9.1, the newest, does not",
    conditions=(
        Condition(_TARGET, f"{__package__}._conditions:sends_no_adapter"),
        Condition(_TARGET, f"{__package__}._conditions:sends_no_adapter_by_its_settings"),  # 0.7.1 has no `mode`
    ),
)
