"""OpenRLHF's PPO with vLLM: detect rollouts that do not come from the policy that is trained."""

from __future__ import annotations

from rlhf_patches import Guard, Variant, Watch, Wrap

from .._rollouts import figures

NAME = "openrlhf-watch-rollouts"
_MAKER = "openrlhf.trainer.ppo_utils.experience_maker:RemoteExperienceMaker"

WATCH = Watch(
    name=NAME,
    summary="logs once if the rollouts of PPO with vLLM do not come from the policy",
    symptom="""\
One line, at level warning:

    openrlhf-watch-rollouts: trainer and engine differ by 0.21 nats per sampled token (limit 0.1). ...""",
    cause="""\
vLLM samples with weights other than the actor's, from another distribution (a temperature that an agent's environment
has set for its own sample or for others), or for another row's prompt.""",
    looks_at="""\
`rollout_log_probs` and `action_log_probs` of the experiences that `make_experience` returns, if they are in the host's
memory: once per batch of rollouts, where OpenRLHF requests log-probabilities from vLLM for the correction of importance
ratios (`--algo.advantage.is_correction_level`; `is_correction_enable` before 0.11.2, `--enable_vllm_is_correction`
before 0.10.2).

The watch does not read `vllm_kl`, the signed mean of the difference: it is smaller, since the differences of the tokens
cancel.

The watch does not cover asynchronous training, and runs where vLLM generates more samples at once than a batch has
(`vllm_generate_batch_size`): both train on rollouts of older weights. It does not cover runs with top-p below 1 or
top-k, which the actor's log-probabilities ignore.""",
    limits=figures.LOG_PROBABILITIES,
    points_to=("openrlhf-own-sampling",),
    references=(
        "https://github.com/OpenRLHF/OpenRLHF/blob/v0.11.2/openrlhf/trainer/ppo_utils/experience_maker.py",
        "https://fengyao.notion.site/off-policy-rl",
    ),
    # Up to 0.8.8 vLLM returns no log-probabilities, and the watch notes nothing.
    variants=(
        Variant(
            Guard("openrlhf", ">=0.8.1"),
            (
                Wrap(
                    target=f"{_MAKER}.make_experience",
                    implementation=f"{__package__}._watched_rollouts:around_make_experience",
                    signature="(self, samples_list)",
                    signature_suffices="the wrapper reads the result only where it has the tensors, on the CPU",
                ),
            ),
            where_defined=(f"{_MAKER}.make_experience_batch",),
        ),
    ),
    obsolete_when="when OpenRLHF itself reports rollouts that are not the policy's",
    affects_rollouts=True,
    observations=f"{__package__}._watched_rollouts:observed",
)
