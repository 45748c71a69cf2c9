"""TRL's GRPO with vLLM: signs that rollouts do not come from the policy that is trained."""

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
        signature_suffices="the watch reads only the trainer's metrics; without these it logs nothing",
    ),
    Wrap(
        target=f"{_TRAINER}._generate",
        implementation=f"{__package__}._watched_rollouts:around_generate",
        signature="(self, prompts)",
        signature_suffices="the watch reads the result only if it is lists of token ids",
    ),
)

WATCH = Watch(
    name=NAME,
    summary="logs once if rollouts of GRPO with vLLM do not come from the policy",
    symptom="""\
One line per figure, at level warning:

    trl-watch-rollouts: trainer and engine differ by 0.21 nats per sampled token at step 3 (limit 0.1). ...""",
    cause="""\
Log-probabilities that differ: vLLM samples with other weights than the trainer's, from another distribution
(temperature, a part of the vocabulary), or for another row's prompt. One cause has no patch, up to 1.16.0: with
`top_p`, `top_k` or `min_p`, vLLM normalizes its log-probabilities over the tokens that these settings keep, and the
trainer normalizes over the whole vocabulary (TRL #6789), so the ratio of the two is too small for every token. Avoid
these settings, or set `vllm_importance_sampling_correction=False`. Structured outputs (`vllm_structured_outputs_regex`,
or `generation_kwargs`) have the same effect, but a larger one (4.8 nats in one run), and no patch repairs it either:
vLLM chooses among the tokens that they allow. The warning names structured outputs first.

Completions that are all alike: engines share a seed, or each request has the same seed (`generation_kwargs={"seed":
1}` on a colocated engine). Completions of one token, or too many tokens: lists of tokens were split, or a limit was
applied twice. A prompt that is not the row's: completions were assigned to other rows, or ranks.""",
    looks_at="""\
- `sampling/sampling_logp_difference/mean`, which the trainer computes, gathers and logs if
  `vllm_importance_sampling_correction` is on (the default), once per batch of rollouts;
- the lists of token ids that `_generate` returns;
- from 0.29.1 on, without images, the prompts that the trainer sends to vLLM and those that vLLM returns, at each turn
  of a conversation.

The watch does not look at evaluation, nor at a run with a `rollout_func`, or with your own `_generate` or
`_generate_single_turn`: these samples are your own, too. The probability of equal completions is known only at
temperature 1, without top-p, top-k, min-p or a penalty. With structured outputs, or with `generation_kwargs` that
constrain completions, neither equal completions nor single tokens are a sign.""",
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
                    signature_suffices="the watch reads the first result only if it is lists of token ids",
                ),
            ),
        ),
    ),
    obsolete_when="when TRL itself logs that rollouts are not the policy's",
    affects_rollouts=True,
    observations=f"{__package__}._watched_rollouts:observed",
)
