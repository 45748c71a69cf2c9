"""TRL's GRPO with vLLM: signs that rollouts are not those of the policy that is trained."""

from __future__ import annotations

from rlhf_patches import Guard, Variant, Watch, Wrap

from .._rollouts import figures

NAME = "trl-watch-rollouts"
_TRAINER = "trl.trainer.grpo_trainer:GRPOTrainer"
OTHER_PROMPT = ("trl-grpo-tool-turns", "trl-grpo-tool-lockstep")
OTHER_POLICY = ("trl-vllm-sleep-weights", "trl-vllm-raw-logprobs", *OTHER_PROMPT)
_WRAPS = (
    Wrap(
        target=f"{_TRAINER}._prepare_inputs",
        implementation=f"{__package__}._watched_rollouts:around_prepare_inputs",
        signature="(self, generation_batch)",
        signature_suffices="what is read is the trainer's metrics; where they are others nothing is said",
    ),
    Wrap(
        target=f"{_TRAINER}._generate",
        implementation=f"{__package__}._watched_rollouts:around_generate",
        signature="(self, prompts)",
        signature_suffices="what it returns is looked at only where it is lists of token ids",
    ),
)

WATCH = Watch(
    name=NAME,
    summary="GRPO with vLLM is looked at for rollouts that do not come from the policy, and says so once",
    symptom="""\
One line of each figure, at level warning:

    trl-watch-rollouts: trainer and engine differ by 0.21 nats per sampled token at step 3 (limit 0.1). ...""",
    cause="""\
Log-probabilities that differ: vLLM samples with other weights than the trainer's, from another distribution
(temperature, a part of the vocabulary), or for another row's prompt. One kind of these nothing repairs, to 1.16.0: with
`top_p`, `top_k` or `min_p` vLLM's log-probabilities are those within what they leave of the vocabulary, the trainer's
those of all of it (TRL #6789), so that the ratio of the two is too small for every token; do without these settings, or
set `vllm_importance_sampling_correction=False`. Structured outputs (`vllm_structured_outputs_regex`, or
`generation_kwargs`) do the same and more, 4.8 nats in one run, and nothing repairs them either: vLLM chooses among what
they allow. The line names them first.

Completions that are all alike: engines share a seed, or each request has the same one (`generation_kwargs={"seed": 1}`
on a colocated engine). Completions of one token, or too many: lists of tokens were taken apart, or a limit was applied
twice. A prompt that is not the row's: completions were handed to other rows, or ranks.""",
    looks_at="""\
`sampling/sampling_logp_difference/mean`, which the trainer computes, gathers and logs where
`vllm_importance_sampling_correction` is on (the default), once per batch of rollouts; the lists of token ids that
`_generate` returns; and from 0.29.1 on those of prompts that vLLM was asked with and says it answered, without images,
at each turn of a conversation. Not of a run with a `rollout_func`, or a `_generate` or `_generate_single_turn` of its
own, whose samples are its own too, nor in evaluation; how likely equal completions are is known at temperature 1 only,
without top-p, top-k, min-p or a penalty. With structured outputs, or with `generation_kwargs` that give completions a
form, neither that nor single tokens mean anything.""",
    limits="\n\n".join((figures.LOG_PROBABILITIES, figures.DROPOUT, figures.SAMPLES, figures.PROMPTS)),
    points_to=(*OTHER_POLICY, "trl-grpo-tool-overflow", "trl-vllm-nan-logprob"),
    references=(
        "https://github.com/huggingface/trl/issues/6789",
        "https://github.com/huggingface/trl/issues/5312",
        "https://github.com/huggingface/trl/blob/v1.16.0/trl/trainer/grpo_trainer.py",
    ),
    variants=(
        Variant(Guard("trl", ">=0.25.0,<0.29.1"), _WRAPS),
        Variant(
            Guard("trl", ">=0.29.1"),
            (
                *_WRAPS,
                Wrap(
                    target="trl.generation.vllm_generation:VLLMGeneration.generate",
                    implementation=f"{__package__}._watched_rollouts:around_engine",
                    signature="(self, prompts, images, num_generations, profiler=None)",
                    signature_suffices="what it returns first is looked at only where it is lists of token ids",
                ),
            ),
        ),
    ),
    obsolete_when="when TRL itself says that rollouts are not the policy's",
    affects_rollouts=True,
    observations=f"{__package__}._watched_rollouts:observed",
)
