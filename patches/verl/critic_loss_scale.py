"""verl's critic: the value loss is averaged over the global mini-batch, not over each micro-batch."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Rewrite, Variant, Wrap

_OURS = f"{__package__}._value_loss"

PATCH = Patch(
    name="verl-critic-loss-scale",
    summary="the critic's gradient does not depend on the number of micro-batches",
    harm="wrong gradient",
    bug="the critic's gradient is multiplied by the number of micro-batches",
    when="PPO with a critic (adv_estimator=gae) on verl's engines",
    symptom="""\
PPO with a critic (`algorithm.adv_estimator=gae`) on verl's engines, FSDP or Megatron: the critic's gradient norm
(`critic/grad_norm`) and `critic/loss` are the number of micro-batches times too large: twice as large where
`ppo_micro_batch_size_per_gpu` is halved, and another number of times in each step with `use_dynamic_bsz`. No error;
`critic/vf_loss` looks right. 0.8.0 has no other critic; 0.7.0 and 0.7.1 use this one with
`trainer.use_legacy_worker_impl=disable`.""",
    cause="""\
The engines add up the gradients of the micro-batches, so each loss has to be its micro-batch's part of the average over
the global mini-batch. `ppo_loss` gives `agg_loss` the numbers of the global mini-batch. `value_loss` does not, and gets
the average over its own micro-batch.""",
    repair="""\
`agg_loss` is given the same numbers for the value loss as for the policy's, as in 0.9.0: `dp_size`, and
`batch_num_tokens` for `token-mean` or `global_batch_size` for the other modes. The objective is the value loss of PPO
(Schulman et al., 2017, arXiv 1707.06347, equation 9), with the clipping that is usual (Huang et al., 2024, arXiv
2403.17031), averaged over the mini-batch as `critic.loss_agg_mode` says. Micro-batches of padding alone have a loss of
0 and not NaN.

`critic/vf_loss` becomes the average over the global mini-batch, in a metric that is summed, as `actor/pg_loss` is. It
stays the average of the micro-batches' averages in 0.7.0, which has no such metrics, and in a trainer of your own that
sets no `global_batch_size`; `critic/loss` is right there, too.

Left alone: a trainer of your own that does not set the number that its `critic.loss_agg_mode` needs; 0.6.1, whose
optional engines (`use_legacy_worker_impl=disable`) do the same to the policy's loss as well; the critics of
`verl.workers.critic`, which are right; and 0.7.0's `seq-mean-token-sum-norm`, which is a sum over the mini-batch.""",
    changes_numbers="""\
with verl 0.8.0 (and 0.7.0, 0.7.1 with `trainer.use_legacy_worker_impl=disable`) the critic's gradient was multiplied by
the number of micro-batches per mini-batch and rank. With the patch it is smaller by that factor, and does not change
with the micro-batch size any more. Adam hides most of a constant factor, except where `critic.optim.clip_grad`, 1.0 by
default, cut the larger gradient off: a run that was tuned with it should have the critic's clipping threshold and
learning rate looked at again. Checkpoints can be trained on.""",
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
)
