"""verl's critic: average the value loss over the global mini-batch, not over each micro-batch."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant, Wrap

_OURS = f"{__package__}._value_loss"

PATCH = Patch(
    name="verl-critic-loss-scale",
    summary="the critic's gradient does not depend on the number of micro-batches",
    harm="wrong gradient",
    bug="the critic's gradient is multiplied by the number of micro-batches",
    when="PPO with a critic (adv_estimator=gae) on verl's engines",
    symptom="""\
PPO with a critic (`algorithm.adv_estimator=gae`) on verl's engines, FSDP or Megatron: the critic's gradient norm
(`critic/grad_norm`) and `critic/loss` are too large by a factor of the number of micro-batches. Halving
`ppo_micro_batch_size_per_gpu` doubles them; with `use_dynamic_bsz` the factor differs in each step. There is no error;
`critic/vf_loss` looks right. 0.8.0 has no other critic; 0.7.0 and 0.7.1 use this critic with
`trainer.use_legacy_worker_impl=disable`.""",
    cause="""\
The engines add up the gradients of the micro-batches, so each loss must be its micro-batch's part of the average over
the global mini-batch. `ppo_loss` passes the numbers of the global mini-batch to `agg_loss`. `value_loss` does not, and
gets the average over its own micro-batch.""",
    repair="""\
For the value loss, the patch passes the same numbers to `agg_loss` as for the policy's loss, as in 0.9.0: `dp_size`,
and `batch_num_tokens` for `token-mean` or `global_batch_size` for the other modes. The objective is the value loss of
PPO (Schulman et al., 2017, arXiv 1707.06347, equation 9) with the usual clipping (Huang et al., 2024, arXiv
2403.17031), averaged over the mini-batch as `critic.loss_agg_mode` specifies. Micro-batches of pure padding have a loss
of 0, not NaN.

`critic/vf_loss` becomes the average over the global mini-batch: verl sums the micro-batches' parts of it, as it does
for `actor/pg_loss`.
`critic/vf_loss` stays the average of the micro-batches' averages in 0.7.0, which has no such metrics, and in a custom
trainer that does not set `global_batch_size`; `critic/loss` is right there, too.

The patch does not change a loss of your own that calls `value_loss`, which may already have the right scale: rank 0
logs one warning. In an engine of your own, methods that call `value_loss` are repaired: remove a scale of yours there.
The patch does not change a custom trainer that does not set the number that its `critic.loss_agg_mode`
needs; 0.6.1, whose optional engines (`use_legacy_worker_impl=disable`) have the same error in the policy's loss as
well; the critics of `verl.workers.critic`, which are right; and 0.7.0's `seq-mean-token-sum-norm`, which is a sum over
the mini-batch.""",
    changes_numbers="""\
With verl 0.8.0 (and 0.7.0, 0.7.1 with `trainer.use_legacy_worker_impl=disable`) the critic's gradient was multiplied by
the number of micro-batches per mini-batch and rank. With the patch the gradient is smaller by that factor, and no
longer depends on the micro-batch size. Adam hides most of a constant factor, except where `critic.optim.clip_grad`, 1.0
by default, clipped the larger gradient: review the critic's clipping threshold and learning rate of a run that was
tuned without the patch. Training can continue from existing checkpoints.""",
    references=("https://github.com/verl-project/verl/pull/6957",),
    variants=(
        Variant(
            Guard("verl", ">=0.7.0,<0.9.0"),
            (
                Wrap(
                    target="verl.workers.utils.losses:value_loss",
                    implementation=f"{_OURS}:value_loss",
                    fingerprints={
                        "8b0808c02220c79d": "0.7.0, 0.7.1",
                        "8a3a6c68adb5036e": "0.8.0.dev0, 0.8.0",
                    },
                ),
                Rewrite(
                    target="verl.trainer.ppo.core_algos:compute_value_loss",
                    pattern=(
                        "agg_loss(loss_mat=clipped_vf_losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode)"
                    ),
                    replacement=(
                        "$AGGREGATED(agg_loss, "
                        "loss_mat=clipped_vf_losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode)"
                    ),
                    inside="0.5 * $LOSS",
                    uses={"AGGREGATED": f"{_OURS}:aggregated"},
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest verl in use is 0.9.0",
    conditions=(
        Condition(
            "verl.workers.utils.losses:value_loss", f"{__package__}._conditions:critic_micro_batches", "micro-batches"
        ),
    ),
)
