"""TRL's vLLM returns log-probabilities of the distribution that it samples from."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Rewrite, Variant

_GIVEN = ("LLM($$$BEFORE, logprobs_mode=$MODE, $$$AFTER)",)


def _processed(target: str, last: str) -> Rewrite:
    """An additional argument of `LLM`, after the value ``last`` of another argument."""
    return Rewrite(
        target=target,
        pattern=last,
        replacement=f'{last}, logprobs_mode="processed_logprobs"',
        alongside=(f"LLM($$$BEFORE, model_impl={last}, $$$AFTER)",),
        unless=_GIVEN,
    )


_SERVER = _processed("trl.scripts.vllm_serve:llm_worker", "script_args.vllm_model_impl")
_COLOCATE = _processed("trl.trainer.grpo_trainer:GRPOTrainer.__init__", "self.args.vllm_model_impl")

# The same text starts the server of 0.21 and 0.22, which returns no log-probabilities.
_GIVES_LOGPROBS = ("trl.scripts.vllm_serve:sanitize_logprob",)

PATCH = Patch(
    name="trl-vllm-raw-logprobs",
    summary="GRPO's importance sampling correction is right at temperatures other than 1",
    harm="wrong gradient",
    affects_rollouts=True,
    bug="vLLM's log-probabilities ignore the temperature, the trainer's do not",
    when="GRPOTrainer on a vLLM server (in 0.23 also with colocate) with a temperature other than 1",
    excluded_by=("use_vllm=false|absent", "trl=sft|dpo|kto|reward|rloo"),
    symptom="""\
`GRPOTrainer` with `vllm_mode="server"` (in 0.23.0 and 0.23.1 with `"colocate"` as well) and a `temperature` other than
1, or a `repetition_penalty`: `sampling/sampling_logp_difference/mean` does not approach 0, and
`sampling/importance_sampling_ratio` does not approach 1, even if both sides have the same weights. TRL multiplies each
token's loss by that ratio, up to the cap. No error.""",
    cause="""\
The trainer divides its logits by the temperature. vLLM returns log-probabilities of the raw logits unless it is
started with `logprobs_mode="processed_logprobs"`, which `trl vllm-serve` does not set.""",
    repair="""\
The patch starts vLLM in that mode, as in 0.27.1 (colocate in 0.24.0). Apply the patch in the process in which vLLM
runs: that of `trl vllm-serve`.

The patch is off unless asked for by name. Enable it if `top_p`, `top_k` and `min_p` are off. In this mode vLLM
normalizes its log-probabilities within the nucleus, and the trainer does not. A run with `top_p=0.5` at temperature 1
agrees as released, and does not agree in this mode (0.27.1 and later use it); at another temperature neither agrees.
The mode belongs to the engine, which starts before a request names its sampling settings. For the same reason reports
cannot say whether a run met the bug. Not repaired: vLLM 0.10.0 and 0.10.1, which ignore the temperature in this mode
too.""",
    contested="with top_p, top_k or min_p vLLM's processed log-probabilities are within the nucleus, and TRL's are not",
    changes_numbers="""\
Since TRL 0.23.0, GRPO on a vLLM server has weighted tokens by a ratio that contains the temperature once, not by the
ratio of two policies. With the patch ratios are about 1 if trainer and vLLM have the same weights, so the gradient is
that of GRPO; runs at a temperature other than 1 are not comparable with earlier ones.""",
    references=(
        "https://github.com/huggingface/trl/pull/4873",
        "https://github.com/huggingface/trl/issues/4159",
    ),
    variants=(
        Variant(
            Guard("trl", ">=0.23.0,<0.24.0"), (_SERVER, _COLOCATE), independent=True, where_defined=_GIVES_LOGPROBS
        ),
        Variant(Guard("trl", ">=0.24.0,<0.27.1"), (_SERVER,), where_defined=_GIVES_LOGPROBS),
    ),
    obsolete_when="when the oldest trl in use is 0.27.1",
)
