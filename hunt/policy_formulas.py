"""Losses of a policy by their papers, in float64, one response at a time: only the tokens that count, nothing padded.

Each function of a response returns what its tokens lose, a number for each of them. What a paper says of a whole
response is that of each of its tokens, so that all of them can be averaged alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Response:
    """The tokens of a response that count: numbers of each, in float64.

    Attributes:
        policy: log-probabilities that are trained.
        old: those of the policy that the ratios are taken to.
        advantages: of either sign; the same for all tokens where a paper has one for a response.
        reference: log-probabilities that a divergence is taken to.
        sampled: log-probabilities of the engine that has generated.
    """

    policy: Any
    old: Any
    advantages: Any
    reference: Any = None
    sampled: Any = None

    @property
    def ratios(self) -> Any:
        return (self.policy - self.old).exp()


@dataclass(frozen=True)
class Limits:
    """How far a ratio may go; each paper's own names are in its function."""

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None
    largest: float | None = None
    strength: float = 0.3
    positive: float = 1.0
    negative: float = 1.05


Loss = Callable[[Response, Limits], Any]


def ppo(response: Response, limits: Limits) -> Any:
    """Schulman et al., arXiv 1707.06347, 7; Ye et al., 1912.09729, 5 (`dual`); two-sided, 2505.07291 (`largest`)."""
    import torch

    gain = response.ratios * response.advantages
    if limits.largest is not None:
        gain = response.ratios.clamp(max=limits.largest) * response.advantages
    bounded = response.ratios.clamp(1 - limits.low, 1 + limits.high) * response.advantages
    found = torch.minimum(gain, bounded)
    if limits.dual is not None:
        floor = torch.maximum(found, limits.dual * response.advantages)
        found = torch.where(response.advantages < 0, floor, found)
    return -found


def gspo(response: Response, limits: Limits) -> Any:
    """Zheng et al., arXiv 2507.18071, 5 and 7: the ratio is a geometric mean over the response."""
    import torch

    ratio = (response.policy - response.old).mean().exp()
    bounded = ratio.clamp(1 - limits.low, 1 + limits.high)
    return -torch.minimum(ratio * response.advantages, bounded * response.advantages)


def gmpo(response: Response, limits: Limits) -> Any:
    """Zhao et al., arXiv 2507.20673, 4: clipped token by token, in the logarithm; then the geometric mean."""
    import torch

    apart, up = response.policy - response.old, response.advantages > 0
    apart = torch.where(up, apart.clamp(max=limits.high), apart.clamp(min=-limits.low))
    return -apart.mean().exp() * response.advantages


def cispo(response: Response, limits: Limits) -> Any:
    """MiniMax, arXiv 2506.13585, 4 and 5: a weight, of which there is no gradient."""
    weight = response.ratios.detach().clamp(1 - limits.low, 1 + limits.high)
    return -weight * response.advantages * response.policy


def sapo(response: Response, limits: Limits) -> Any:
    """Gao et al., arXiv 2511.20347, 5 and 6: a sigmoid in place of a border."""
    import torch

    heat = torch.where(response.advantages > 0, limits.positive, limits.negative).double()
    return -torch.sigmoid(heat * (response.ratios - 1)) * 4 / heat * response.advantages


def gpg(response: Response, limits: Limits) -> Any:
    """Chu et al., arXiv 2504.02546, 7: REINFORCE."""
    return -response.policy * response.advantages


def dro(response: Response, limits: Limits) -> Any:
    """Richemond et al., arXiv 2405.19107, 6, without what has no gradient."""
    apart = response.policy - response.old
    return -(response.policy * response.advantages - limits.strength / 2 * apart**2)


def _dppo(response: Response, limits: Limits, divergence: Any) -> Any:
    """Arrived at where a ratio moves on beyond the border, and its probability with it: no gradient."""
    import torch

    ratio, up = response.ratios.detach(), response.advantages > 0
    beyond = torch.where(up, (ratio > 1) & (divergence > limits.high), (ratio < 1) & (divergence > limits.low))
    weight = ratio.clamp(max=limits.dual) * ~beyond
    return -weight * response.advantages * response.policy


def dppo_tv(response: Response, limits: Limits) -> Any:
    """arXiv 2602.04879: the total variation of what is sampled, against all else."""
    return _dppo(response, limits, (response.policy.exp() - response.old.exp()).abs().detach())


def dppo_kl(response: Response, limits: Limits) -> Any:
    """arXiv 2602.04879: the divergence of two coins, the old policy's first."""
    new, old = response.policy.detach().exp(), response.old.exp()
    divergence = old * (old / new).log() + (1 - old) * ((1 - old) / (1 - new)).log()
    return _dppo(response, limits, divergence)


LOSSES: Mapping[str, Loss] = {
    "ppo": ppo,
    "gspo": gspo,
    "gmpo": gmpo,
    "cispo": cispo,
    "sapo": sapo,
    "gpg": gpg,
    "dro": dro,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
}


def covariances(responses: Sequence[Response]) -> list[Any]:
    """Cui et al., arXiv 2505.22617, 10: of each token's advantage and log-probability, over all responses."""
    import torch

    advantages, policy = (
        torch.cat([getattr(response, name).detach() for response in responses]) for name in ("advantages", "policy")
    )
    found = (advantages - advantages.mean()) * (policy - policy.mean())
    return list(found.split([len(response.policy) for response in responses]))


def kl_cov(responses: Sequence[Response], share: float, strength: float) -> list[Any]:
    """Cui et al., 12: the tokens with the largest covariance lose their distance to the old policy."""
    import torch

    every = covariances(responses)
    flat = torch.cat(every)
    border = flat.sort(descending=True).values[max(1, int(share * len(flat))) - 1]
    return [
        -response.ratios * response.advantages + strength * (response.policy - response.old).abs() * (found >= border)
        for response, found in zip(responses, every, strict=True)
    ]


def divergence(kind: str, policy: Any, other: Any) -> Any:
    """Schulman, joschu.net/blog/kl-approx: k1, k2, k3; with a plus, of k2's gradient."""
    apart = policy - other
    if kind.endswith("+"):
        value, gradient = (divergence(name, policy, other) for name in (kind[:-1], "k2"))
        return value.detach() + gradient - gradient.detach()
    return {"k1": apart, "abs": apart.abs(), "k2": apart**2 / 2, "k3": (-apart).exp() - 1 + apart}[kind]


def clipped_values(predicted: Any, old: Any, returns: Any, border: float) -> Any:
    """Of PPO's critic: the larger of two squared errors, halved."""
    import torch

    near = torch.minimum(torch.maximum(predicted, old - border), old + border)
    return torch.maximum((predicted - returns) ** 2, (near - returns) ** 2) / 2


def averaged(losses: Sequence[Any], how: str, scale: float) -> Any:
    """Of all responses: ``token-mean``, ``token-sum``, ``seq-mean-token-mean``, and sums divided by a scale."""
    if how in ("token-mean", "token-sum"):
        return sum(each.sum() for each in losses) / (sum(map(len, losses)) if how == "token-mean" else 1)
    if how == "seq-mean-token-mean":
        return sum(each.mean() for each in losses) / len(losses)
    return sum(each.sum() for each in losses) / len(losses) / (scale if how.endswith("norm") else 1)
