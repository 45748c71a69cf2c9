"""OpenRLHF's estimates of the KL, and their gradients: ``--out FOLDER``, on one rank."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from openrlhf.models.utils import compute_approx_kl, masked_mean

from rlhf_patches.proving import states

DIFFERENCES = (0.0, 0.4, -0.4, 2.0, -2.0, -2.5, -3.0, 9.0, -9.0, -40.0, 95.0, -95.0, -30000.0)
"""Differences of log-probabilities, policy minus reference; float32's exponential overflows at 88.7."""


def estimate(kind: str, **options: Any) -> dict[str, Any]:
    """Each token's estimate, and the gradient of the mean over all tokens but the last two."""
    log_probs = torch.tensor([[-1.0 + min(difference, 0.0) for difference in DIFFERENCES]], requires_grad=True)
    base = torch.tensor([[-1.0 - max(difference, 0.0) for difference in DIFFERENCES]])
    mask = torch.tensor([[1.0] * (len(DIFFERENCES) - 1) + [0.0]])
    found = compute_approx_kl(log_probs, base, kl_estimator=kind, **options)
    masked_mean(found, mask).backward()
    assert log_probs.grad is not None
    gradient = ["nan" if one != one else one for one in log_probs.grad[0].tolist()]
    return {"estimates": found[0].tolist(), "gradient": gradient}


def observe() -> dict[str, Any]:
    found: dict[str, Any] = {kind: estimate(kind) for kind in ("k1", "k2", "k3")}
    if "unbiased_gradient" in inspect.signature(compute_approx_kl).parameters:
        found["k3, unbiased gradient"] = estimate("k3", unbiased_gradient=True)
    infinite = {f"{a} and {b}": without_probability(a, b) for a in (-1.0, -math.inf) for b in (-1.0, -math.inf)}
    return found | {"differences": DIFFERENCES, "infinite": infinite}


def without_probability(log_prob: float, base: float) -> list[str]:
    """One token's k3 estimate and its gradient."""
    given = torch.tensor([log_prob], requires_grad=True)
    found = compute_approx_kl(given, torch.tensor([base]), kl_estimator="k3")
    found.backward()
    assert given.grad is not None
    return [str(found.item()), str(given.grad.item())]


def main() -> None:
    states.report("openrlhf-k3-gradient", observe, states.parser().parse_args().out)
