"""Excludes masked and filtered tokens from the policy loss, whatever their values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_patches import Guard, Patch, Rewrite, Variant

if TYPE_CHECKING:
    import torch


def selected(mask: torch.Tensor | None, values: torch.Tensor) -> torch.Tensor:
    """Returns the values where the mask is not 0, and exact zeros elsewhere, in forward and in the gradient.

    Args:
        mask: [batch, tokens], or [batch, 1]; None (packed samples of releases before 0.7) for all.
        values: [batch, tokens].
    """
    return values if mask is None else values.masked_fill(mask == 0, 0.0)


_TARGET = "openrlhf.models.loss:PolicyLoss.forward"


def _rewrite(pattern: str, replacement: str, matches: int = 1) -> Rewrite:
    uses = {"SELECTED": f"{__name__}:{selected.__name__}"}
    return Rewrite(target=_TARGET, pattern=pattern, replacement=replacement, matches=matches, uses=uses)


def _select(expression: str, matches: int = 1) -> Rewrite:
    return _rewrite(expression, f"$SELECTED(action_mask, {expression})", matches)


_ADVANTAGES = _rewrite(
    "surr1 = ratio * advantages", "advantages = $SELECTED(action_mask, advantages); surr1 = ratio * advantages"
)
_ONCE, _TWICE = _select("log_probs - old_log_probs"), _select("log_probs - old_log_probs", matches=2)
_KL = _select("rollout_log_probs - old_log_probs")
_WEIGHT, _WEIGHTS = _select("old_log_probs - rollout_log_probs"), _select("old_log_probs - rollout_log_probs", 2)
_GSPO = _select("log_probs - rollout_log_probs")
_ICEPOP = _rewrite("vllm_is = vllm_is * mask", "vllm_is = $SELECTED(mask, vllm_is)")
_SEQUENCE = _rewrite(
    "loss = seq_mask.unsqueeze(-1) * vllm_is * loss", "loss = $SELECTED(seq_mask.unsqueeze(-1), vllm_is) * loss"
)
# Not p and q, from which the statistic is computed: where both are 1 (half precision rounds 1 - 1e-6), it is NaN.
_DIVERGENCE = _rewrite(
    "masked_mean(stat, action_mask, dim=-1).unsqueeze(-1)",
    "masked_mean($SELECTED(action_mask, stat), action_mask, dim=-1).unsqueeze(-1)",
)

# OpenRLHF added the corrections for the mismatch with vLLM one by one.
_SHAPES = {
    ">=0.3.6.post1,<0.8.9": (_ONCE, _ADVANTAGES),
    ">=0.8.9,<0.8.10": (_ONCE, _ADVANTAGES, _WEIGHT, _KL),
    ">=0.8.10,<0.9.1": (_TWICE, _ADVANTAGES, _GSPO, _WEIGHT, _KL),
    ">=0.9.1,<0.9.3": (_TWICE, _ADVANTAGES, _GSPO, _WEIGHTS, _KL, _ICEPOP),
    ">=0.9.3,<0.10.3": (_TWICE, _ADVANTAGES, _GSPO, _WEIGHT, _KL, _ICEPOP, _SEQUENCE),
    ">=0.10.3,<0.11.1": (_ONCE, _ADVANTAGES, _GSPO, _WEIGHT, _KL, _ICEPOP, _SEQUENCE),
    "==0.11.1": (_ONCE, _ADVANTAGES, _GSPO, _WEIGHT, _KL, _SEQUENCE),
    "==0.11.2": (_ONCE, _ADVANTAGES, _GSPO, _WEIGHT, _KL, _DIVERGENCE),
}

PATCH = Patch(
    name="openrlhf-masked-nan",
    summary="masked or filtered tokens cannot make the policy loss NaN",
    harm="wrong gradient",
    bug="a NaN or an overflow of a masked or filtered token makes the policy loss NaN",
    when="values that are not finite on tokens that are not trained: padding, tools' answers, filtered tokens",
    symptom="""\
The policy loss and its metrics `ppo_kl` and `vllm_kl` are NaN although every trained token has finite values, and the
next optimizer step may set every weight to NaN. There are two cases. Either a NaN or an infinity is in the
log-probabilities or advantages of a masked token, padding or a tool's answer. Or, from 0.9.1 on, ICEPOP or seq-mask-tis
filters out a token whose importance weight overflows: a difference of more than 88 between log-probabilities of the
policy and of vLLM.""",
    cause="""\
`PolicyLoss.forward` computes ratios and losses of all tokens and multiplies masked tokens by 0, but NaN * 0 and inf * 0
are NaN. ICEPOP (0.9.1 to 0.11.0) and seq-mask-tis (0.9.3 to 0.11.1) multiply by their filters in the same way. The
gradient is NaN as well with GSPO, up to 0.10.2 in general, and where a filtered weight overflows. From 0.10.3 on the
ratio is clamped first, which also removes the gradient of a masked NaN: with PPO only the loss is NaN there. Filters of
whole sequences compare with NaN and drop every sequence that has a NaN in its padding.""",
    repair="""\
Before any computation, the patch sets masked differences of log-probabilities, advantages and divergences to zero
(`action_mask`), and filtered importance weights too. They are exact zeros, in forward and in the gradient. Loss and
gradient of trained tokens are bitwise identical: the clipped objective of PPO (Schulman et al.,
[arXiv:1707.06347](https://arxiv.org/abs/1707.06347), equation 7), with dual clipping (Ye et al.,
[arXiv:1912.09729](https://arxiv.org/abs/1912.09729), equation 5), and GSPO (Zheng et al.,
[arXiv:2507.18071](https://arxiv.org/abs/2507.18071), equation 5). A divergence that filters whole sequences (0.11.2)
covers their own tokens, in half precision, too.

A NaN of a trained token in `log_probs`, `old_log_probs` or `advantages` stays a NaN. A NaN in `rollout_log_probs` stays
a NaN with TIS and with GSPO; ICEPOP and seq-mask-tis filter out the token or the sequence, as 0.11.2 itself does.

The patch does not change packed samples before 0.7, which have no mask; `ValueLoss`; the KL penalty, which is a
separate function; and, before 0.10.3, sequences without any token, whose mean is 0 / 0.""",
    references=(
        "https://github.com/OpenRLHF/OpenRLHF/pull/1240",
        "https://github.com/OpenRLHF/OpenRLHF/pull/1314",
    ),
    variants=tuple(Variant(Guard("openrlhf", versions), changes) for versions, changes in _SHAPES.items()),
    obsolete_when="when OpenRLHF's policy loss no longer multiplies by its mask; 0.11.2, the newest release, does",
)
