"""NeMo-RL's asynchronous GRPO: reset the prefix cache, which older weights have computed, with each weight update."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Rewrite, Variant

_IN_FLIGHT = 'async_cfg.get("in_flight_weight_updates", False)'
_FLAG = 'async_cfg.get("recompute_kv_cache_after_weight_updates", False)'


def _resumed(module: str, unless: str | None = None) -> Rewrite:
    # The code calls no function of ours: NeMo-RL's actors have separate environments, to which Ray sends this class.
    waited = f"not {_IN_FLIGHT}" + (f" and {unless}" if unless else "")
    return Rewrite(
        target=f"{module}:AsyncTrajectoryCollector.resume_after_refit",
        pattern=f"{_IN_FLIGHT} and {_FLAG}",
        replacement=f"({_IN_FLIGHT} and {_FLAG}) or ({waited})",
        alongside=("self.policy_generation.invalidate_kv_cache()", "self._refit_pause_cleared.set()"),
    )


PATCH = Patch(
    name="nemo-rl-async-prefix-cache",
    summary="asynchronous GRPO without in-flight updates resets the prefix cache with each weight update",
    harm="wrong data",
    affects_rollouts=True,
    bug="after a weight update, requests reuse the prefix cache of older weights",
    when="GRPO with `async_grpo.enabled` and without `in_flight_weight_updates`, and repeated prompts or prefixes",
    excluded_by=("grpo.async_grpo.enabled=false|absent", "grpo.async_grpo.in_flight_weight_updates=true"),
    symptom="""\
With `grpo.async_grpo.enabled` the difference between the log-probabilities of generation and of training
(`token_mult_prob_error`, `gen_kl_error`) grows from step to step, and decreases where validation or a restart empties
the cache. The difference is larger if prompts share a longer prefix: a system prompt, tools, a prompt of the next
epoch. There is no error.""",
    cause="""\
`AsyncTrajectoryCollector.resume_after_refit` resets vLLM's prefix cache only with both `in_flight_weight_updates` and
`recompute_kv_cache_after_weight_updates`. Without in-flight updates it never resets the cache: keys and values of a
prefix remain those of the weights that computed it first, on GPUs of compute capability 8 and later, where NeMo-RL
enables the cache.""",
    repair="""\
Without `in_flight_weight_updates` the patch resets the prefix cache with each weight update, by NeMo-RL's own
`invalidate_kv_cache`, after all generations have ended, for which `prepare_for_refit` waits. PR 3152 does this if the
flag `recompute_kv_cache_after_weight_updates` is set.

The following stay as released: runs with `in_flight_weight_updates`, in which you choose by the flag, and in which vLLM
does not reset a cache that a running request holds (see PR 4018); Megatron's generation, which has no such method.
NeMo-RL's main branch has version 0.6.0 and contains the fix for runs with the flag, not for others. The patch is
refused there.

A report cannot tell whether a run met this bug: the code runs in an actor of NeMo-RL that has an environment of its
own, without rlhf_patches.""",
    references=(
        "https://github.com/NVIDIA-NeMo/RL/pull/3152",
        "https://github.com/NVIDIA-NeMo/RL/pull/4018",
    ),
    # The metadata of the tag v0.5.0 has version 0.5.0rc0; main had 0.6.0 on 2026-08-22, after v0.7.0.
    variants=(
        Variant(Guard("nemo-rl", ">=0.4.0,<0.7.0"), (_resumed("nemo_rl.algorithms.async_utils"),)),
        Variant(
            Guard("nemo-rl", ">=0.7.0,<=0.7.0"),
            (
                _resumed(
                    "nemo_rl.algorithms.async_utils.trajectory_collector",
                    'self.master_config.policy.get("generation", {}).get("backend", "") != "megatron"',
                ),
            ),
        ),
    ),
    obsolete_when="when NeMo-RL resets the cache without in-flight updates also without the flag; none does so far",
    changes_numbers="""\
Since 0.4.0, GRPO with `async_grpo.enabled` and without in-flight updates sampled with a prefix cache that older weights
had computed. The log-probabilities of generation were those of this mixture of weights, and importance sampling
corrected for it. With the patch they are those of the last update's weights, and the first requests after an update
compute the cache of their prompts again. Training can continue from existing checkpoints.""",
)
