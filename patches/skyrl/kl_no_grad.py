"""SkyRL's KL loss: compute its gradient."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_WORKERS = "skyrl.backends.skyrl_train.workers"
_TARGETS = (
    f"{_WORKERS}.worker:PolicyWorkerBase._forward_backward_micro",
    f"{_WORKERS}.megatron.megatron_model_wrapper:MegatronModelWrapper.forward_backward_mini_batch",
)


def _with_gradient(target: str) -> Rewrite:
    return Rewrite(
        target=target,
        pattern="compute_approx_kl",
        replacement="$WITH_GRADIENT(compute_approx_kl)",
        inside="compute_approx_kl(action_log_probs, base_action_log_probs, $$$ARGUMENTS)",
        alongside=("kl_loss_term = kl_loss * $COEFFICIENT", "policy_loss + kl_loss_term - entropy_loss_term"),
        uses={"WITH_GRADIENT": f"{__package__}._kl:with_gradient"},
    )


PATCH = Patch(
    name="skyrl-kl-no-grad",
    summary="the KL loss has a gradient",
    harm="wrong gradient",
    bug="the KL loss has no gradient, so nothing keeps the policy near the reference model",
    when="trainer.algorithm.use_kl_loss=True (the default), with FSDP and Megatron",
    excluded_by=("trainer.algorithm.use_kl_loss=false",),
    symptom="""\
SkyRL 0.1.0: `policy_kl` grows as if `kl_loss_coef` were 0, whatever its value. The loss that is logged contains the KL
term, but its gradient is 0. There is no error. `use_kl_loss` is on by default. The penalty in the reward
(`use_kl_in_reward`) works.""",
    cause="""\
`compute_approx_kl` is decorated with `@torch.no_grad()`. That is right for a reward; the loss calls the same
function.""",
    repair="""\
The two loss functions, of FSDP's workers and of Megatron's, call the same function without the decorator, as in 0.2.0.
The values of the loss and of all metrics stay the same. The KL term of the reward is not affected. Neither are your own
functions in place of `compute_approx_kl`.""",
    changes_numbers="""\
With SkyRL 0.1.0, `kl_loss_coef` had no effect on the policy. With the patch it has: the policy stays closer to the
reference model. Review the coefficient (default 0.001) if it was tuned on 0.1.0. Runs with `use_kl_loss=false` are not
affected.""",
    references=("https://github.com/NovaSky-AI/SkyRL/issues/1340", "https://github.com/NovaSky-AI/SkyRL/pull/1353"),
    variants=(Variant(Guard("skyrl", ">=0.1.0,<0.2.0"), tuple(map(_with_gradient, _TARGETS)), independent=True),),
    obsolete_when="when the oldest SkyRL in use is 0.2.0",
    conditions=tuple(Condition(target, f"{__package__}._conditions:has_a_kl_loss") for target in _TARGETS),
)
