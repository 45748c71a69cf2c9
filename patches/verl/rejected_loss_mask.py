"""verl's rollout correction: tokens that are rejected are not among those that the loss is a mean over."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

NO_PROOF = "verl's trainer needs Ray and its storage, TransferQueue; the test has a dictionary in place of the storage"
_SUFFIX = "PPOTrainer._compute_advantage"
_OURS = f"{__package__}._kept_tokens:with_loss_mask"


def _rewritten(module: str) -> Rewrite:
    return Rewrite(
        target=f"{module}:{_SUFFIX}",
        pattern="TensorDict(output, batch_size=len(batch))",
        replacement="TensorDict($WITH_LOSS_MASK(output, response_mask, batch, self, tq, core_algos), "
        "batch_size=len(batch))",
        alongside=(
            'fields.append("response_mask")',
            "output[field] = response_to_nested(data.batch[field], response_mask)",
            "compute_rollout_correction_and_add_to_batch($$$)",
        ),
        unless=('fields.append("loss_mask")', 'output["loss_mask"] = $MASK', 'data.batch["loss_mask"] = $MASK'),
        uses={"WITH_LOSS_MASK": _OURS},
    )


_SYNC, _V1 = "verl.trainer.main_ppo_sync", "verl.trainer.ppo.v1.trainer_base"
PATCH = Patch(
    name="verl-rejected-loss-mask",
    summary="with rollout correction, token-mean divides by the number of tokens that are kept",
    harm="wrong gradient",
    bug="the loss of the tokens that are kept is divided by the number of all tokens, rejected ones too",
    when="algorithm.rollout_correction.rollout_rs with loss_agg_mode=token-mean, in verl's default trainer",
    excluded_by=("algorithm.rollout_correction.rollout_rs=absent|null", "trainer.use_v1=false"),
    symptom="""\
`algorithm.rollout_correction.rollout_rs` with `loss_agg_mode: token-mean`, its default, in the trainer that 0.9.0 made
the default (`trainer.use_v1=true`; `main_ppo_sync` in 0.8.0), without bypass mode: loss and gradient of actor and
critic are multiplied by the share of the tokens that are kept. If half of the tokens are rejected, each step has half
of its gradient. `actor/grad_norm` and `actor/pg_loss` fall while `rollout_corr/rollout_rs_masked_fraction` rises. No
error.""",
    cause="""\
The agent loop's workers write `response_mask` to the storage, and the same mask as `loss_mask`. `_compute_advantage`
writes `response_mask` back without the rejected tokens, and leaves `loss_mask`. The engines divide by the sum of
`loss_mask`. `RayPPOTrainer` makes `loss_mask` from `response_mask` afterward, so both are without these tokens.""",
    repair="""\
Where tokens were rejected, the patch also writes `loss_mask` without these tokens, as `RayPPOTrainer` does. The mean is
then over the tokens that are kept.

It acts only where the actor's or the critic's `loss_agg_mode` is `token-mean`, where verl's own agent loop has written
the batch, and where the `loss_mask` that is stored equals the mask before the rejection. A `loss_mask` of your own
stays, and so does what your own agent loop manager has written. With a trainer of your own, a subclass too, or with
your own rollout correction, `agg_loss`, policy or value loss, all stays as released. The policy losses `sapo` and
`geo_mean` are not means over tokens, so they stay as well, unless a KL or entropy term is added. With multi-token
prediction on Megatron, its loss is over the tokens that are kept, too.

A mini-batch may have no token left, if enough responses to fill it are padding or rejected as a whole. Its mean would
be NaN, and as released its gradient is 0. The batch is then left as released, and the log says so once. Bypass mode
rejects tokens within the loss; the patch does not change it. `python -m verl.trainer.main_ppo_sync` of 0.8.0 runs this
module as `__main__`, which cannot be patched.""",
    changes_numbers="""\
With `rollout_rs` and `token-mean` in verl's default trainer, 0.9.0 and 0.9.1, or in `main_ppo_sync` of 0.8.0, loss and
gradient were multiplied by the share of tokens that are kept. With the patch they are larger, by the inverse of that
share. Review the learning rate and `actor.optim.clip_grad` if a large share is rejected. Training can continue from
existing checkpoints.""",
    references=(
        "https://github.com/verl-project/verl/blob/v0.9.1/verl/trainer/ppo/v1/trainer_base.py",
        "https://github.com/verl-project/verl/blob/v0.9.1/verl/workers/utils/padding.py",
    ),
    variants=(
        Variant(Guard("verl", ">=0.8.0.dev0,<0.9.0"), (_rewritten(_SYNC),)),
        Variant(Guard("verl", ">=0.9.0,<=0.9.1"), (_rewritten(_V1),)),
    ),
    obsolete_when="when verl writes both masks; 0.9.1, the newest, does not",
    conditions=tuple(Condition(f"{module}:{_SUFFIX}", measure="loss x") for module in (_SYNC, _V1)),
)
