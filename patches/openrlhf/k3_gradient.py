"""The k3 estimate of the KL: clamp it before the exponential, not only after it."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Rewrite, Variant


def _variant(versions: str, old: str, new: str, bounded: str) -> Variant:
    return Variant(
        Guard("openrlhf", versions),
        (
            Rewrite(
                target="openrlhf.models.utils:compute_approx_kl",
                pattern=old,
                replacement=new,
                alongside=(f"{bounded}.clamp(min=-10, max=10)",),
            ),
        ),
    )


_K3 = "(-log_ratio).exp() - 1 + log_ratio"
_BOUNDED_K3 = "(-log_ratio.clamp(min=-10)).exp() - 1 + log_ratio.clamp(min=-10)"

PATCH = Patch(
    name="openrlhf-k3-gradient",
    summary="the gradient of the k3 KL is 0 where the KL is clamped, not NaN",
    harm="wrong gradient",
    bug="the gradient of the k3 KL is NaN where the KL is clamped",
    when="--use_kl_loss, --kl_estimator k3, and a token whose log-probability is 88 below the reference's",
    excluded_by=("kl_estimator=k1|k2", "algo.kl.estimator=k1|k2"),
    symptom="""\
With `--use_kl_loss` and `--kl_estimator k3`, the loss is finite and its gradient is NaN, and the next optimizer step
sets every weight to NaN. This occurs if a token's log-probability under the policy is lower than under the reference by
more than 88. The token may be masked.""",
    cause="""\
`compute_approx_kl` clamps its result to 10, which hides the overflow of the exponential. Backward multiplies the
clamp's gradient, 0, by the exponential's, inf.""",
    repair="""\
The patch clamps the difference to 10 before the exponential, where the estimate is 22,015 and is clamped anyway. All
results and gradients that were not NaN are bitwise identical. The result itself was NaN for a token with probability 0
under the policy (a log-probability of minus infinity): there it is now the clamp's limit, 10. The estimate is that of
GRPO (Shao et al., [arXiv:2402.03300](https://arxiv.org/abs/2402.03300), equation 4).

Releases before 0.8.6 clamp nothing, and the estimate itself is infinite.""",
    references=(
        "https://github.com/OpenRLHF/OpenRLHF/pull/1335",
        "https://github.com/OpenRLHF/OpenRLHF/pull/1160",
    ),
    variants=(
        _variant(
            ">=0.8.6,<0.9.9",
            old="log_ratio = -log_ratio",
            new="log_ratio = (-log_ratio).clamp(max=10)",
            bounded="log_ratio",
        ),
        _variant(">=0.9.9,<0.11.1", old=f"log_ratio = {_K3}", new=f"log_ratio = {_BOUNDED_K3}", bounded="log_ratio"),
        _variant("==0.11.1", old=f"value = {_K3}", new=f"value = {_BOUNDED_K3}", bounded="value"),
    ),
    obsolete_when="when the oldest OpenRLHF in use is 0.11.2",
)
