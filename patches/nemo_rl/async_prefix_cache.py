"""NeMo-RL's asynchronous GRPO: no request is answered from what older weights have left in the prefix cache."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Rewrite, Variant

_IN_FLIGHT = 'async_cfg.get("in_flight_weight_updates", False)'
_FLAG = 'async_cfg.get("recompute_kv_cache_after_weight_updates", False)'


def _resumed(module: str, unless: str | None = None) -> Rewrite:
    # Nothing of ours is called: NeMo-RL's actors have environments of their own, to which Ray sends this class.
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
    bug="after a weight update prompts are read from the prefix cache, as older weights have computed it",
    when="GRPO with `async_grpo.enabled` and without `in_flight_weight_updates`, and a prompt that comes again",
    excluded_by=("grpo.async_grpo.enabled=false|absent", "grpo.async_grpo.in_flight_weight_updates=true"),
    symptom="""\
With `grpo.async_grpo.enabled` the difference between the log-probabilities of generation and of training
(`token_mult_prob_error`, `gen_kl_error`) grows from step to step, and falls back where validation or a restart empties
the cache. It is the more, the more prompts have in common: a system prompt, tools, a prompt of the next epoch. No
error.""",
    cause="""\
`AsyncTrajectoryCollector.resume_after_refit` resets vLLM's prefix cache with `in_flight_weight_updates` and
`recompute_kv_cache_after_weight_updates` alone. Without in-flight updates it does not, whatever the latter says: keys
and values of a prefix stay those of the weights that have computed it first, on GPUs of compute capability 8 and
later, where NeMo-RL has the cache on.""",
    repair="""\
Without `in_flight_weight_updates` the prefix cache is reset with each weight update, by NeMo-RL's own
`invalidate_kv_cache`, when all generations have ended, as `prepare_for_refit` waits for them. PR 3152 does so where
`recompute_kv_cache_after_weight_updates` is set.

Left alone, and so as released: `in_flight_weight_updates`, with which the flag is a choice, and vLLM does not reset a
cache that a running request holds (PR 4018 is about that); Megatron's generation, which has no such method. main has
been repaired for the flag alone, and calls itself 0.6.0: there the patch is refused.""",
    references=(
        "https://github.com/NVIDIA-NeMo/RL/pull/3152",
        "https://github.com/NVIDIA-NeMo/RL/pull/4018",
    ),
    # The tag v0.5.0 calls itself 0.5.0rc0 in its metadata; main said 0.6.0 on 2026-08-22, after v0.7.0.
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
    obsolete_when="when NeMo-RL resets the cache without in-flight updates whatever the flag says; none so far does",
    changes_numbers="""\
Since 0.4.0, GRPO with `async_grpo.enabled` and without in-flight updates sampled with prefixes as older weights had
computed them. Log-probabilities of generation were those of that mixture, which importance sampling corrected for. With
the patch they are those of the weights of the last update, and the first requests after an update compute their
prompts. Checkpoints can be trained on.""",
)
