"""verl's Dr.GRPO: one divisor for all responses, not the longest response of each micro-batch."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Rewrite, Variant

PATCH = Patch(
    name="verl-dr-grpo-length-bias",
    summary="Dr.GRPO divides by the response length of the rollout, not by the longest response of each micro-batch",
    harm="wrong gradient",
    bug="Dr.GRPO divides by the longest response of each micro-batch: its length bias is back",
    when="loss_agg_mode=seq-mean-token-sum-norm (Dr.GRPO) without a loss_scale_factor, in verl's default trainer",
    excluded_by=(
        "actor_rollout_ref.actor.loss_agg_mode=token-mean|token-sum|seq-mean-token-sum|seq-mean-token-mean",
        "trainer.use_v1=false",
    ),
    symptom="""\
Dr.GRPO (`actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm`) with `loss_scale_factor: null`, its default,
in the trainer that 0.9.0 made the default (`trainer.use_v1=true`; `main_ppo_sync` in 0.8.0): the gradient depends on
`ppo_micro_batch_size_per_gpu` and on `use_dynamic_bsz`. With one response to a micro-batch each is divided by its own
length, so that a long wrong answer costs less by the token than a short one: the bias that Dr.GRPO removes.
`actor/grad_norm` and `actor/pg_loss` are too large, by `max_response_length` over such lengths. No error.""",
    cause="""\
That trainer's batches have no padding. `ppo_loss` pads each micro-batch to its longest response, and `agg_loss`, told
no factor, divides by the width of what it gets. The older trainer pads all responses to `rollout.response_length`, so
that the same line divides by this. `actor.yaml` says so still: "If null, uses response_length".""",
    repair="""\
Where the mode is this one and `loss_scale_factor` is null, the worker's own configuration of the actor gets
`rollout.response_length` for it, which is `data.max_response_length` by default. It is what the same settings do in the
older trainer, what `actor.yaml` promises, and the constant of Dr.GRPO (Liu et al., 2025, arXiv 2503.20783). The KL and
entropy terms, which `agg_loss` adds up in the same mode, get it with the policy's. In the older trainer, whose
responses have that width already, every number is as it was.

Left alone: a `loss_scale_factor` of yours; the critic, whose `critic.loss_agg_mode` follows the actor's (set
`critic.loss_scale_factor` to `max_response_length`, 0.9.0 and later); and the trainer's logged `actor/entropy`.""",
    changes_numbers="""\
with `seq-mean-token-sum-norm` and no `loss_scale_factor` in verl's default trainer, 0.9.0 and 0.9.1, or in
`main_ppo_sync` of 0.8.0, each response was divided by the longest one of its micro-batch. With the patch all are
divided by `rollout.response_length`, as the older trainer does: the gradient is smaller, by this length over that of
responses as they are, and long responses weigh as much by the token as short ones. Look at learning rate and
`actor.optim.clip_grad` again. Checkpoints can be trained on.""",
    references=(
        "https://github.com/verl-project/verl/pull/4360",
        "https://github.com/verl-project/verl/issues/3741",
        "https://arxiv.org/abs/2503.20783",
    ),
    variants=(
        Variant(
            Guard("verl", ">=0.8.0.dev0,<=0.9.1"),
            (
                Rewrite(
                    target="verl.workers.engine_workers:ActorRolloutRefWorker.init_model",
                    pattern="omega_conf_to_dataclass(self.config.actor)",
                    replacement="$WITH_DIVISOR(omega_conf_to_dataclass(self.config.actor), self.config)",
                    alongside=(
                        # Of the first release that has a trainer without padding.
                        "partial(distillation_ppo_loss, config=actor_config, distillation_config=distillation_config)",
                        "partial(ppo_loss, config=actor_config)",
                    ),
                    uses={"WITH_DIVISOR": f"{__package__}._response_length:with_divisor"},
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest verl in use has it repaired",
)
