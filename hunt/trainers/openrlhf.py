"""OpenRLHF's policy loss with each objective, and its estimates of the KL."""

from __future__ import annotations

import math
from typing import Any

from hunt import policy_formulas
from hunt.outcomes import Outcome
from hunt.policy_formulas import Limits, Response
from hunt.trainers import CannotRun, trainer

UNDER_THE_MASK = {"zero": 0.0, "nan": math.nan, "-inf": -math.inf, "large": 1e4}
OBJECTIVES = ("ppo", "dual", "gspo", "tis", "icepop", "seq-mask-tis", "binary_kl", "tv")


@trainer(*(f"openrlhf/{name}" for name in OBJECTIVES))
def policy(
    *, name: str, masked_values: str = "zero", order: str = "given", padding: int = 0, by: str = "trainer"
) -> Outcome:
    """Masked tokens hold `masked_values`, in all that a rollout hands over."""
    import torch

    from rlhf_patches.patches.openrlhf.proofs import masked_nan_ranks

    loss_of = masked_nan_ranks.make_loss(name)
    if loss_of is None:
        raise CannotRun(f"this OpenRLHF has no {name}")
    if by == "formula":
        return policy_by_formula(name, masked_nan_ranks.make_batch(0.0, overflow=False))
    filled = UNDER_THE_MASK[masked_values]
    batch = masked_nan_ranks.make_batch(filled, overflow=False)
    rows = [0, 1, 2] if order == "given" else [2, 1, 0]
    batch = {
        key: torch.nn.functional.pad(value, (0, padding), value=0 if key == "action_mask" else filled)[rows]
        for key, value in batch.items()
    }
    log_probs = batch["log_probs"].clone().requires_grad_()
    loss, *_ = loss_of(**{**batch, "log_probs": log_probs})
    loss.backward()
    assert log_probs.grad is not None
    gradient = {f"row {row}": log_probs.grad[at, :5] for at, row in enumerate(rows)}
    return {"loss": {"step": loss.detach()}, "gradient": gradient}


def policy_by_formula(name: str, batch: dict[str, Any]) -> Outcome:
    """A mean over tokens, of GSPO over responses of means over tokens."""
    import torch

    losses, own = [], []
    for row, mask in enumerate(batch["action_mask"].bool()):
        fields = ("log_probs", "old_log_probs", "advantages", "rollout_log_probs")
        policy, old, advantages, sampled = (batch[field][row][mask].double() for field in fields)
        own.append(policy.requires_grad_())
        response = Response(policy, old, advantages, sampled=sampled)
        loss = policy_formulas.LOSSES["gspo" if name == "gspo" else "ppo"](
            response, Limits(dual=1.5 if name == "dual" else None)
        )
        losses.append(loss * correction(name, (old - sampled).exp(), old.exp(), sampled.exp()))
    how = "seq-mean-token-mean" if name == "gspo" else "token-mean"
    total = policy_formulas.averaged(losses, how, 1.0)
    total.backward()
    gradient = {}
    for row, mask in enumerate(batch["action_mask"].bool()):
        gradient[f"row {row}"] = torch.zeros(len(mask), dtype=torch.float64).masked_scatter(mask, own[row].grad)
    return {"loss": {"step": total.detach()}, "gradient": gradient}


def correction(name: str, ratios: Any, trained: Any, sampled: Any) -> Any:
    """Of each token: its ratio to vLLM, clipped or left out, by itself or by what the response has on average."""
    if name not in ("tis", "icepop", "seq-mask-tis", "binary_kl", "tv"):
        return 1.0
    if name == "tis":
        return ratios.clamp(0.5, 5.0)
    if name == "icepop":
        return ratios * (ratios >= 0.5) * (ratios <= 5.0)
    if name == "seq-mask-tis":
        mean = ratios.log().mean().exp()
        return ratios * bool(0.5 <= mean <= 5.0)
    coins = sampled * (sampled / trained).log() + (1 - sampled) * ((1 - sampled) / (1 - trained)).log()
    apart = coins if name == "binary_kl" else (trained - sampled).abs()
    return ratios * bool(apart.mean() <= 5.0)


@trainer("openrlhf/k1", "openrlhf/k2", "openrlhf/k3")
def divergence(*, name: str, by: str = "trainer") -> Outcome:
    """Shao et al., arXiv 2402.03300, equation 4, and Schulman's k1 and k2; bounded by 10, where their gradient is 0."""
    import torch

    differences = (0.0, 0.4, -0.4, 2.0, -2.0, -3.0, 9.0, -9.0, -40.0, -95.0)
    start = [[-1.0 + min(difference, 0.0) for difference in differences]]
    base = torch.tensor([[-1.0 - max(difference, 0.0) for difference in differences]])
    if by == "formula":
        given = torch.tensor(start, dtype=torch.float64, requires_grad=True)
        apart = given - base.double()
        k3 = torch.exp((-apart).clamp(max=80)) - 1 + apart
        found = {"k1": apart, "k2": apart**2 / 2, "k3": torch.where(k3 > 10, k3.detach() * 0 + 10, k3)}[name]
        found = found.clamp(-10, 10)
    else:
        from openrlhf.models.utils import compute_approx_kl

        given = torch.tensor(start, requires_grad=True)
        found = compute_approx_kl(given, base, kl_estimator=name)
    found.mean().backward()
    return {"values": {"estimates": found.detach()}, "gradient": {"log-probabilities": given.grad}}
