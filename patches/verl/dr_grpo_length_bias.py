"""verl's Dr.GRPO: use one divisor for all responses, not the longest response of each micro-batch."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

PATCH = Patch(
    name="verl-dr-grpo-length-bias",
    summary="Dr.GRPO divides by the response length of the rollout, not by the longest response of each micro-batch",
    harm="wrong gradient",
    bug="Dr.GRPO divides by the longest response of each micro-batch, which reintroduces the length bias",
    when="loss_agg_mode=seq-mean-token-sum-norm (Dr.GRPO) without a loss_scale_factor, in verl's default trainer",
    excluded_by=(
        "actor_rollout_ref.actor.loss_agg_mode=token-mean|token-sum|seq-mean-token-sum|seq-mean-token-mean",
        "trainer.use_v1=false",
    ),
    symptom="""\
Dr.GRPO (`actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm`) with `loss_scale_factor: null`, its default,
in the trainer that 0.9.0 made the default (`trainer.use_v1=true`; `main_ppo_sync` in 0.8.0): the gradient depends on
`ppo_micro_batch_size_per_gpu` and on `use_dynamic_bsz`. With one response per micro-batch, each response is divided by
its own length, so a long wrong answer costs less per token than a short one: this is the bias that Dr.GRPO removes.
`actor/grad_norm` and `actor/pg_loss` are too large, by `max_response_length` over such lengths. There is no error.""",
    cause="""\
That trainer's batches have no padding. `ppo_loss` pads each micro-batch to its longest response, and `agg_loss`,
without a factor, divides by the width of its input. The older trainer pads all responses to `rollout.response_length`,
so the same line divides by this length. `actor.yaml` still states: "If null, uses response_length".""",
    repair="""\
Where the mode is this one and `loss_scale_factor` is null, the patch sets it to `rollout.response_length`
(`data.max_response_length` by default) in the worker's own copy of the actor's configuration. The same settings do this
in the older trainer, `actor.yaml` promises it, and it is the constant of Dr.GRPO (Liu et al., 2025, arXiv 2503.20783).
`agg_loss` aggregates the KL and entropy terms in the same mode, so these terms get the same divisor. Results of the
older trainer, whose responses already have that width, are bitwise identical.

The patch does not change a `loss_scale_factor` that you set; the critic, whose `critic.loss_agg_mode` follows the
actor's (set `critic.loss_scale_factor` to `max_response_length`, 0.9.0 and later); and the trainer's logged
`actor/entropy`.

Reports decide by the settings of 0.9 whether a run has the bug; in 0.8 that is unknown. A micro-batch with a response
of full length is right without the patch.""",
    changes_numbers="""\
With `seq-mean-token-sum-norm` and no `loss_scale_factor` in verl's default trainer, 0.9.0 and 0.9.1, or in
`main_ppo_sync` of 0.8.0, each response was divided by the longest response of its micro-batch. With the patch all
responses are divided by `rollout.response_length`, as in the older trainer: the gradient is smaller, by this length
over the responses' actual length, and long responses weigh as much per token as short ones. Review the learning rate
and `actor.optim.clip_grad`. Training can continue from existing checkpoints.""",
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
    obsolete_when="when the oldest verl in use contains the fix",
    conditions=(
        Condition(
            "verl.workers.engine_workers:ActorRolloutRefWorker.init_model",
            f"{__package__}._conditions:divides_by_the_longest",
        ),
    ),
)
