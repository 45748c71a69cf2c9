"""verl's GMPO: average the policy loss over the global mini-batch, not over each micro-batch."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_OTHERS = "vanilla|dppo_tv|dppo_kl|gspo|sapo|gpg|clip_cov|kl_cov|dro|cispo"

PATCH = Patch(
    name="verl-gmpo-micro-batches",
    summary="GMPO's gradient does not depend on the number of micro-batches",
    harm="wrong gradient",
    bug="GMPO's gradient is multiplied by the number of micro-batches",
    when="policy_loss.loss_mode=geo_mean (GMPO) on verl's engines, and more than one micro-batch",
    excluded_by=(f"actor_rollout_ref.actor.policy_loss.loss_mode={_OTHERS}",),
    symptom="""\
GMPO (`actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean`) on verl's engines, FSDP or Megatron: `actor/grad_norm`
and `actor/pg_loss` are too large by a factor of the number of micro-batches per mini-batch and rank: 8 for a mini-batch
of 8 with `ppo_micro_batch_size_per_gpu=1`. With `use_dynamic_bsz` the factor differs in each step, and rows of small
micro-batches count more than others. Relative to the policy loss, the KL and entropy terms are too small by the same
factor. There is no error. 0.7.0 and 0.7.1 have the bug with `trainer.use_legacy_worker_impl=disable`; 0.8.0 and later
have no other workers.""",
    cause="""\
The engines add up the gradients of the micro-batches, so each loss must be its micro-batch's part of the average over
the global mini-batch. Other policy losses call `agg_loss`, to which `ppo_loss` passes the numbers of the mini-batch.
`compute_policy_loss_geo_mean` ends with `torch.mean` over the sequences of its own micro-batch.""",
    repair="""\
The patch multiplies the mean by the micro-batch's part of the mini-batch: its number of sequences, times `dp_size`,
divided by `global_batch_size`. The result is the mean over the sequences of GMPO (Zhao et al., 2025, arXiv 2507.20673),
with the divisor of verl's other losses. Sequences without a token that counts have a loss of 0 and are included in that
number, as in `torch.mean`. The gradient of one micro-batch that is the whole mini-batch is bitwise identical.

The patch does not change the older workers of 0.6 and 0.7, which divide by the number of micro-batches themselves and
set no `global_batch_size`; a custom trainer that sets no `global_batch_size`; and 0.6.1, whose optional engines have
the same error in all policy losses.""",
    changes_numbers="""\
With GMPO on verl's engines, 0.7.0 to 0.9.1, the policy's gradient was multiplied by the number of micro-batches per
mini-batch and rank. With the patch the gradient is smaller by that factor, and no longer depends on the micro-batch
size. Adam hides most of a constant factor. It does not if `actor.optim.clip_grad` (1.0 by default) clipped the larger
gradient, or if there is a KL or entropy term, because these terms had the right size. Review clipping, learning rate
and these coefficients of a run that was tuned without the patch. Training can continue from existing checkpoints.""",
    references=(
        "https://github.com/verl-project/verl/issues/7913",
        "https://github.com/verl-project/verl/pull/5614",
        "https://github.com/verl-project/verl/pull/7916",
    ),
    variants=(
        Variant(
            Guard("verl", ">=0.7.0,<=0.9.1"),
            (
                Rewrite(
                    target="verl.trainer.ppo.core_algos:compute_policy_loss_geo_mean",
                    pattern="torch.mean(pg_losses)",
                    replacement="$PART(torch.mean(pg_losses), pg_losses, config)",
                    inside="pg_loss = torch.mean(pg_losses)",
                    alongside=("pg_losses = -advantage * ratio",),
                    uses={"PART": f"{__package__}._mini_batch:part_of_the_mean"},
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest verl in use contains the fix",
    conditions=(
        Condition(
            "verl.trainer.ppo.core_algos:compute_policy_loss_geo_mean",
            f"{__package__}._conditions:gmpo_micro_batches",
            "policy loss x",
        ),
    ),
)
