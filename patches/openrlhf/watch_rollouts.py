"""OpenRLHF's PPO with vLLM: signs that rollouts are not those of the policy that is trained."""

from __future__ import annotations

from rlhf_patches import Guard, Variant, Watch, Wrap

from .._rollouts import figures

NAME = "openrlhf-watch-rollouts"
_MAKER = "openrlhf.trainer.ppo_utils.experience_maker:RemoteExperienceMaker"

WATCH = Watch(
    name=NAME,
    summary="PPO with vLLM is looked at for rollouts that do not come from the policy, and says so once",
    symptom="""\
One line, at level warning:

    openrlhf-watch-rollouts: trainer and engine differ by 0.21 nats per sampled token (limit 0.1). ...""",
    cause="""\
vLLM samples with other weights than the actor's, from another distribution (a temperature that an agent's environment
has set for itself or for others), or for another row's prompt.""",
    looks_at="""\
`rollout_log_probs` and `action_log_probs` of the experiences that `make_experience` returns, in the host's memory, else
nothing is looked at: once per batch of rollouts, where vLLM was asked for log-probabilities, for the correction of
importance ratios (`--algo.advantage.is_correction_level`; `is_correction_enable` before 0.11.2,
`--enable_vllm_is_correction` before 0.10.2).

Not `vllm_kl`, the mean of their difference with its sign: it is the smaller, as the differences of the tokens cancel.

Not of asynchronous training, nor where vLLM makes more samples at once than a batch has
(`vllm_generate_batch_size`): both train on rollouts of older weights. Not with top-p below 1 or top-k, which the
actor's log-probabilities do not know of.""",
    limits=figures.LOG_PROBABILITIES,
    points_to=("openrlhf-own-sampling",),
    references=(
        "https://github.com/OpenRLHF/OpenRLHF/blob/v0.11.2/openrlhf/trainer/ppo_utils/experience_maker.py",
        "https://fengyao.notion.site/off-policy-rl",
    ),
    # Until 0.8.8 there are no log-probabilities of vLLM's, and nothing is noted.
    variants=(
        Variant(
            Guard("openrlhf", ">=0.8.1"),
            (
                Wrap(
                    target=f"{_MAKER}.make_experience",
                    implementation=f"{__package__}._watched_rollouts:around_make_experience",
                    signature="(self, samples_list)",
                    signature_suffices="what it returns is looked at only where it has the tensors, on the CPU",
                ),
            ),
            where_defined=(f"{_MAKER}.make_experience_batch",),
        ),
    ),
    obsolete_when="when OpenRLHF itself says that rollouts are not the policy's",
    affects_rollouts=True,
    observations=f"{__package__}._watched_rollouts:observed",
)
