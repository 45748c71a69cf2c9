"""The loss of verl's actor by its formula, in float64: PPO's clipped objective, with entropy and KL."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

NAME = "loss by its formula"
_MEANS, _BY_FACTOR = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"), "seq-mean-token-sum-norm"
_LARGEST = 20.0
"""verl's bound of a token's log-ratio."""


def config_of(loss: Any) -> Any:
    """The configuration of a loss whose formula is known; None for another loss."""
    if not isinstance(loss, functools.partial) or getattr(loss.func, "__module__", "") != "verl.workers.utils.losses":
        return None
    config = loss.keywords.get("config")
    if loss.func.__name__ != "ppo_loss" or config is None or config.policy_loss.get("loss_mode") != "vanilla":
        return None
    core_algos = importlib.import_module("verl.trainer.ppo.core_algos")
    if core_algos.get_policy_loss_fn("vanilla").__module__ != core_algos.__name__:
        return None
    known = config.loss_agg_mode in _MEANS or (config.loss_agg_mode == _BY_FACTOR and config.loss_scale_factor)
    known = known and (not config.use_kl_loss or _divergence(config.kl_loss_type, torch.zeros(1)) is not None)
    return config if known else None


def loss(
    config: Any, tokens: float, *, model_output: Any, data: Any, dp_group: Any = None
) -> tuple[torch.Tensor, dict[str, Any]]:
    """As verl's engine calls a loss, of a micro-batch.

    Args:
        config: the actor's.
        tokens: the trained tokens of the mini-batch on all ranks.
    """
    padded = importlib.import_module("verl.workers.utils.padding").no_padding_2_padding
    names = ("response_mask", "old_log_probs", "advantages", "rollout_is_weights", "ref_log_prob")
    fields = data.select(*(name for name in names if name in data)).to_padded_tensor()
    mask = fields["response_mask"].bool()
    given = {name: fields[name].double().masked_fill(~mask, 0) for name in names[1:] if name in fields}
    now = padded(model_output["log_probs"], data).double().masked_fill(~mask, 0)

    ratio = (now - given["old_log_probs"]).clamp(-_LARGEST, _LARGEST).exp()
    low, high = (
        config.clip_ratio if each is None else each for each in (config.clip_ratio_low, config.clip_ratio_high)
    )
    objective = torch.minimum(ratio * given["advantages"], ratio.clamp(1 - low, 1 + high) * given["advantages"])
    bound = config.get("clip_ratio_c", 3.0) * given["advantages"]
    objective = torch.where(given["advantages"] < 0, torch.maximum(objective, bound), objective)
    of_tokens = -objective * given.get("rollout_is_weights", 1.0)
    if config.entropy_coeff:
        of_tokens = of_tokens - config.entropy_coeff * padded(model_output["entropy"], data).double()
    if config.use_kl_loss:
        of_tokens = of_tokens + config.kl_loss_coef * _divergence(config.kl_loss_type, now - given["ref_log_prob"])
    of_tokens = of_tokens.masked_fill(~mask, 0)
    return _mean(of_tokens, mask, config, tokens, data) * data["dp_size"], {}


def _mean(of_tokens: torch.Tensor, mask: torch.Tensor, config: Any, tokens: float, data: Any) -> torch.Tensor:
    if config.loss_agg_mode == "token-mean":
        return of_tokens.sum() / tokens
    of_rows = of_tokens.sum(-1)
    if config.loss_agg_mode == "seq-mean-token-mean":
        of_rows = of_rows / mask.sum(-1).clamp(min=1)
    elif config.loss_agg_mode == _BY_FACTOR:
        of_rows = of_rows / config.loss_scale_factor
    return of_rows.sum() / data["global_batch_size"]


def _divergence(kind: str, apart: torch.Tensor) -> Any:
    """The estimator's value, up to its gradient; None if it is unknown."""
    if kind in ("kl", "k1"):
        return apart
    if kind == "abs":
        return apart.abs()
    if kind in ("mse", "k2") or kind.endswith("+"):
        return apart.square() / 2
    if kind in ("low_var_kl", "k3"):
        return ((-apart).clamp(-_LARGEST, _LARGEST).exp() + apart - 1).clamp(-10, 10)
    return None
