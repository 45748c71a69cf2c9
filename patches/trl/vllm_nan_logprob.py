"""Tokens for which vLLM has no log-probability: the trainer's own replaces it, so their importance ratio is 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf_patches import Guard, Patch, Rewrite, Signature, Variant

_TRAINER = "trl.trainer.grpo_trainer:GRPOTrainer"
_NAN = float("nan")


def with_nan(completions: Sequence[Sequence[float | None]] | None) -> list[list[float]] | None:
    """Each completion's log-probabilities, with NaN for None; if there is no None, the list that vLLM returned."""
    if completions is None or not any(one is None for completion in completions for one in completion):
        return completions  # type: ignore[return-value]
    return [[_NAN if one is None else one for one in completion] for completion in completions]


def filled(sampled: Any, recomputed: Any) -> Any:
    """The sampler's log-probabilities ``[B, T]``, with the trainer's where the sampler's are NaN."""
    return sampled.where(~sampled.isnan(), recomputed)


_FILLED = {"FILLED": f"{__name__}:{filled.__name__}"}

PATCH = Patch(
    name="trl-vllm-nan-logprob",
    summary="GRPO continues if vLLM returns NaN for a token's log-probability",
    harm="crash",
    affects_rollouts=True,
    bug="the run raises a RuntimeError if vLLM returns NaN for a token's log-probability",
    when="GRPOTrainer with vLLM, and a policy that gives some tokens a probability close to 1",
    excluded_by=("trl=sft|dpo|kto|reward|rloo",),
    symptom="""\
`GRPOTrainer` with vLLM raises `RuntimeError: Could not infer dtype of NoneType`, often late in training, when the
policy gives some tokens a probability close to 1. vLLM returns NaN as the log-probability of one of them.""",
    cause="""\
The code that reads the log-probabilities from vLLM's answer writes None for NaN (until 0.27.2 only with a vLLM
server), and the trainer makes a tensor of the list. NaN would be no better: the importance ratio, and with it the
loss, would be NaN.""",
    repair="""\
The patch gives such a token the log-probability that the trainer computes for it before the first update, from the
weights that vLLM has sampled with. Its importance ratio is 1, alone and in the product over a sequence, as for a token
on which both agree. Its part of the KL divergence that masks off-policy sequences is that of the updates. In the metric
`sampling/sampling_logp_difference` it counts as 0. Tokens that vLLM has scored stay bit for bit identical.

TRL 1.11.0 also uses a ratio of 1, and excludes such tokens from the divergence and from the metric.

Not repaired: copies of this code in `trl.experimental` (GFPO, GRPO with a replay buffer, DPPO), and TRL 0.23.0 to
0.27.0, where a vLLM server returns None, and vLLM in the trainer's own process NaN.""",
    references=(
        "https://github.com/huggingface/trl/issues/6166",
        "https://github.com/huggingface/trl/pull/6693",
    ),
    variants=(
        Variant(
            Guard("trl", ">=0.27.1,<1.11.0"),
            (
                Rewrite(
                    target=f"{_TRAINER}._generate_and_score_completions",
                    pattern="sampling_per_token_logps_list is not None",
                    alongside=("[torch.tensor($$$LOGPS) for logps in sampling_per_token_logps_list]",),
                    replacement=(
                        "(sampling_per_token_logps_list := $WITH_NAN(sampling_per_token_logps_list)) is not None"
                    ),
                    uses={"WITH_NAN": f"{__name__}:{with_nan.__name__}"},
                ),
                Rewrite(
                    target=f"{_TRAINER}._generate_and_score_completions",
                    pattern="per_token_logps_diff = (old_per_token_logps - sampling_per_token_logps) * mask",
                    unless=("torch.nan_to_num(per_token_logps_diff, nan=0.0)",),
                    # The metrics and the trainer's batch read it by this name.
                    replacement=(
                        "per_token_logps_diff = (old_per_token_logps - (sampling_per_token_logps := "
                        "$FILLED(sampling_per_token_logps, old_per_token_logps))) * mask"
                    ),
                    uses=_FILLED,
                ),
                Rewrite(  # masks sequences even if the ratio is not corrected
                    target=f"{_TRAINER}._compute_loss",
                    pattern='inputs.get("sampling_per_token_logps", old_per_token_logps)',
                    replacement=(
                        '$FILLED(inputs.get("sampling_per_token_logps", old_per_token_logps), old_per_token_logps)'
                    ),
                    uses=_FILLED,
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest trl in use is 1.11",
    signatures=(Signature("RuntimeError", "Could not infer dtype of NoneType", specific=False),),
)
