"""The gradient of a mixture's auxiliary losses against the loss that Megatron logs, at the model's last router.

No later layer's auxiliary loss depends on the last router, so its gradient with the configured coefficients, less its
gradient without them, is the gradient of its own losses. Megatron logs these losses; autograd gives their gradient.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from . import window
from .megatron_parameters import Mine, of_one, shards
from .megatron_window import core
from .relation import Relation, Verdict, not_checked

NAME = "router's loss"
_ROUTER = "megatron.core.transformer.moe.router"
_LOGGED = "the loss that Megatron logs"
_KINDS = {
    "load_balancing_loss": "aux_loss",
    "seq_load_balancing_loss": "seq_aux_loss",
    "global_load_balancing_loss": "global_aux_loss",
}
_ROUNDING = 1e-4
"""A gradient here is the difference of two."""
_TOO_SMALL = 0.02


@dataclass(frozen=True)
class Seen:
    """What one rank saw of its last router.

    Args:
        layer: the number of the router's layer.
        whole: the gradient, with the other losses, as a sketch.
        without: the gradient without the auxiliary losses.
        of_replica: the gradient of what this rank logs, of losses that each data-parallel rank has for itself.
        of_all: the same of losses over all data-parallel ranks.
        routed: the number of tokens that this rank routes in a micro-batch.
    """

    layer: int
    whole: torch.Tensor
    without: torch.Tensor
    of_replica: torch.Tensor
    of_all: torch.Tensor
    routed: float


class Router:
    """The last router of this rank; `present` if it has one that computes auxiliary losses.

    Args:
        chunks: the model's, within DistributedDataParallel.
        config: the model's.
    """

    def __init__(self, chunks: list[Any], config: Any) -> None:
        self._chunks, self._config = chunks, config
        self._module = sys.modules.get(_ROUTER)
        kind = getattr(self._module, "TopKRouter", ())
        modules = [each for chunk in chunks for each in chunk.modules() if kind and isinstance(each, kind)]
        routers = [each for each in modules if each.weight.requires_grad]
        self._last: Any = max(routers, key=lambda each: each.layer_number or 0, default=None)
        self._collects = False
        self._parts: list[torch.Tensor] = []
        self._routed, self._passes = 0.0, 0

    @property
    def present(self) -> bool:
        """Whether the configuration has auxiliary losses; equal on all ranks."""
        return bool(self._config.num_moe_experts) and bool(_coefficients(self._config))

    @property
    def depends_on_others(self) -> bool:
        """Whether a micro-batch's loss depends on the micro-batches before it."""
        return self.present and "global_aux_loss" in _kinds(self._config)

    @contextlib.contextmanager
    def nothing_logged(self) -> Iterator[None]:
        """Within the context, nothing is added to what the run logs of its auxiliary losses."""
        own = {}
        stand_ins = {"save_to_aux_losses_tracker": self._log, "get_moe_metrics_tracker": lambda: _Tracker(self._log)}
        for name, stand_in in stand_ins.items():
            if self._module is not None and hasattr(self._module, name):
                own[name] = getattr(self._module, name)
                setattr(self._module, name, stand_in)
        try:
            yield
        finally:
            for name, each in own.items():
                setattr(self._module, name, each)

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Within the context, take the gradient of what is logged."""
        if self._last is None:
            yield
            return
        self._collects, self._routed, self._passes = True, 0.0, 0
        self._parts = [torch.zeros_like(self._last.weight, dtype=torch.float64) for _ in range(2)]
        hook = self._last.register_forward_pre_hook(self._count, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()
            self._collects = False

    @contextlib.contextmanager
    def without_losses(self) -> Iterator[None]:
        """Within the context, coefficients are 0."""
        configs = {id(each.config): each.config for chunk in self._chunks for each in chunk.modules() if _routes(each)}
        kept = [(each, each.moe_aux_loss_coeff, each.moe_z_loss_coeff) for each in configs.values()]
        try:
            for each, weights, _ in kept:
                each.moe_aux_loss_coeff = [0.0] * len(weights) if isinstance(weights, (list, tuple)) else 0.0
                each.moe_z_loss_coeff = None
            yield
        finally:
            for each, *own in kept:
                each.moe_aux_loss_coeff, each.moe_z_loss_coeff = own

    def gradient(self) -> torch.Tensor | None:
        """This rank's shard of the last router's gradient, as a sketch."""
        if self._last is None:
            return None
        gradient = self._last.weight.main_grad.detach().reshape(-1)
        start, end = shards(self._chunks).get(id(self._last.weight), (0, gradient.numel()))
        whole = torch.zeros_like(gradient)
        whole[start:end] = gradient[start:end]
        return of_one(whole)

    def seen(self, whole: torch.Tensor | None, without: torch.Tensor | None) -> Seen | None:
        """What this rank saw, given the gradients with and without auxiliary losses."""
        if self._last is None or whole is None or without is None or not self._passes:
            return None
        replica, every = (of_one(each.reshape(-1)) / self._passes for each in self._parts)
        return Seen(self._last.layer_number, whole, without, replica, every, self._routed / self._passes)

    def _count(self, module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Count a micro-batch's tokens, without those that are padding to the router."""
        if torch.is_grad_enabled():
            hidden, padding, *_ = (*given, *named.values(), None)
            tokens = hidden.numel() / hidden.shape[-1]
            self._routed += tokens * (1.0 if padding is None else float((~padding).double().mean()))
            self._passes += 1

    def _log(self, name: str, loss: Any, layer_number: Any, *more: Any, reduce_group: Any = None, **named: Any) -> None:
        if not self._collects or layer_number != self._last.layer_number or not loss.requires_grad:
            return
        with _alone(loss):
            (gradient,) = torch.autograd.grad(loss, [self._last.weight], retain_graph=True, allow_unused=True)
        if gradient is None:
            return
        state = core("parallel_state")
        together = state.get_tensor_model_parallel_world_size() * state.get_context_parallel_world_size()
        times = _coefficients(self._config).get(_KINDS.get(name, name), 0.0)
        # Without a group that adds it up, the loss is a mean over the ranks that share a sequence.
        self._parts[int(reduce_group is not None and reduce_group.size() > together)] += (
            times * gradient.double() / (1 if reduce_group is not None else together)
        )


@contextlib.contextmanager
def _alone(loss: torch.Tensor) -> Iterator[None]:
    """Within the context, a loss has its own gradient only; megatron-core adds the z-loss's where logits are used."""
    scaler = core("transformer.moe.moe_utils").MoEAuxLossAutoScaler
    own, scaler.main_loss_backward_scale = scaler.main_loss_backward_scale, torch.zeros((), device=loss.device)
    try:
        yield
    finally:
        scaler.main_loss_backward_scale = own


class _Tracker:
    """In place of megatron-core's since 0.19."""

    def __init__(self, log: Any) -> None:
        self.record = log


def _routes(module: Any) -> bool:
    return hasattr(module, "config") and hasattr(module.config, "moe_z_loss_coeff")


def _kinds(config: Any) -> list[str]:
    kinds = config.moe_router_load_balancing_type
    return [str(each) for each in kinds] if isinstance(kinds, (list, tuple)) else [str(kinds)]


def _coefficients(config: Any) -> dict[str, float]:
    """The coefficients that are not 0, by kind."""
    weights = config.moe_aux_loss_coeff
    weights = weights if isinstance(weights, (list, tuple)) else [weights] * len(_kinds(config))
    found = {kind: each for kind, each in zip(_kinds(config), weights, strict=False) if kind.endswith("aux_loss")}
    return {kind: float(each) for kind, each in (found | {"z_loss": config.moe_z_loss_coeff}).items() if each}


def relation(of_ranks: list[Mine], seen: list[Seen | None], noise: float, per_token: bool) -> Relation:
    """Compare the last router's gradient with that of the logged losses."""
    layers = [each.layer for each in seen if each is not None]
    if not layers:
        return not_checked(NAME, "no layer of this model has a trained TopKRouter of megatron-core, with a number")
    last = max(layers)
    here = [(mine, each) for mine, each in zip(of_ranks, seen, strict=True) if each is not None and each.layer == last]
    holders = [(mine, each) for mine, each in here if mine.place.tensor == 0]
    if of_ranks[0].sharded:
        whole = torch.stack([each.whole for _, each in holders]).sum(0)
        without = torch.stack([each.without for _, each in holders]).sum(0)
    else:
        whole, without = holders[0][1].whole, holders[0][1].without
    tokens: dict[int, float] = {}
    for mine in of_ranks:
        if mine.place.tensor == 0 and mine.tokens:
            tokens[mine.place.data] = tokens.get(mine.place.data, 0.0) + mine.tokens[0]
    replicas = {mine.place.data for mine, _ in here}
    total = sum(tokens.values())
    if per_token and not total:
        return not_checked(NAME, "the loss function returns no number of tokens")
    by_rank = dict.fromkeys(replicas, 1 / len(replicas))
    by_tokens = {each: tokens.get(each, 0.0) / total if total else 0.0 for each in replicas}
    logged = torch.stack([_logged(here, weights) for weights in (by_rank, by_tokens)[: 1 + per_token]])
    apart = whole - without
    size = float(apart.norm())
    noise = max(_ROUNDING, noise * float(whole.norm()) / size if size else 1.0)
    if not float(logged.norm()):
        return not_checked(NAME, "the logged losses have no gradient in the first micro-batch")
    if noise > _TOO_SMALL:
        return not_checked(NAME, "its gradient is too small beside that of the other losses")
    laws = {_LOGGED: [1.0, 0.0][: 1 + per_token]}
    routed = sum(each.routed for _, each in here)
    masked = f"{_LOGGED}, times all tokens per trained token"
    if per_token:
        laws[f"{_LOGGED}, weighted by tokens"] = [0.0, 1.0]
    if per_token and routed > total:
        laws[masked] = [routed / total, 0.0]
    result = window.judge(apart, logged, laws, noise)
    if result.factor is None:
        text = f"{result.deviation:.2g} of its gradient is not that of {_LOGGED} (noise {noise:.0e})"
        return Relation(NAME, Verdict.DEVIATES, "", text)
    measured = f"{result.factor:.3f}"
    if result.law == masked:
        text = f"{routed:.0f} tokens are routed, and the loss is divided by {total:.0f} trained ones"
        return Relation(NAME, Verdict.NOTE, f"{routed / total:.3f}", text)
    if result.law:
        return Relation(NAME, Verdict.HOLDS, measured, f"{result.law} ({result.deviation:.0e}, noise {noise:.0e})")
    return Relation(NAME, Verdict.DEVIATES, measured, f"{result.factor:.3f} x {result.nearest}")


def _logged(here: list[tuple[Mine, Seen]], weights: dict[int, float]) -> torch.Tensor:
    """The gradient of the logged losses, given the weights of data-parallel ranks."""
    return torch.stack([each.of_all + weights[mine.place.data] * each.of_replica for mine, each in here]).sum(0)
