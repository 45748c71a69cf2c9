"""Gradients of a mixture's auxiliary losses alone, of a GPT on one rank or two: ``--out FOLDER --patch NAME CASE...``.

Megatron's own schedule, of a language model's loss times 0. Each case before apply() of the patch and after it, the
first one also after revert(). On one rank, as ``reference``: the same gradients in float64, by formulas of our own from
the router's logits.
"""

from __future__ import annotations

import functools
import importlib
import json
import operator
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import pytest
import torch

from rlhf_patches.proving import states
from tests.harness import megatron_on_cpu

torch.set_num_threads(1)
megatron_on_cpu.install()

from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.dot_product_attention import DotProductAttention

from hunt import megatron_gpt
from tests.harness import small_gpt

ROWS, LENGTH, EXPERTS, TOPK, COEFFICIENT = 4, 8, 4, 2, 0.5
HIDDEN = 2
"""Of each row, tokens at its end that a mask hides: of the halves that two ranks have, one is all valid."""
LOGGED = "logged"
Case = dict[str, Any]
LOSSES: dict[str, Case] = {
    "aux": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": COEFFICIENT},
    "seq": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": COEFFICIENT},
    "global": {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": COEFFICIENT},
    "z": {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": COEFFICIENT},
}


class OwnPart(DotProductAttention):
    """Attention within this rank's part of a sequence: what other ranks have of it only TransformerEngine can see."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        divided, config.context_parallel_size = config.context_parallel_size, 1
        super().__init__(config, *args, **kwargs)
        config.context_parallel_size = divided

    def forward(self, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        own = torch.arange(query.shape[0]) // (
            LENGTH // 2 if parallel_state.get_context_parallel_world_size() == 1 else LENGTH
        )
        hidden = (own[:, None] != own) | torch.ones(len(own), len(own), dtype=torch.bool).triu(1)
        return super().forward(query, key, value, hidden[None, None], attn_mask_type=small_gpt.AttnMaskType.padding)


def tokens() -> torch.Tensor:
    return torch.randint(small_gpt.VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(3))


def model_of(loss: str, per_token: bool) -> Any:
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    layout = megatron_gpt.Layout(
        tensor=tensor, context=parallel_state.get_context_parallel_world_size(), sequence=tensor > 1
    )
    settings = {**layout.settings, **LOSSES[loss], "num_moe_experts": EXPERTS, "moe_router_topk": TOPK}
    model = small_gpt.make_model(
        False,
        num_layers=1,
        attention=OwnPart,
        position="none",
        calculate_per_token_loss=per_token,
        moe_token_dispatcher_type="alltoall",
        add_bias_linear=False,
        **settings,
    )
    for name, parameter in megatron_gpt.named([model]):
        megatron_gpt.fill(name, parameter)
    model.config.finalize_model_grads_func = finalize_model_grads
    return model


def part(whole: torch.Tensor) -> torch.Tensor:
    """Of the rows every second one with two data-parallel ranks, and of each row what this rank has."""
    ranks, rank = (getattr(parallel_state, f"get_context_parallel_{of}")() for of in ("world_size", "rank"))
    replicas, replica = (getattr(parallel_state, f"get_data_parallel_{of}")() for of in ("world_size", "rank"))
    return whole[replica::replicas].chunk(ranks, 1)[rank]


def mask(kind: str) -> torch.Tensor:
    """True where a token is hidden: none, or each row's end."""
    return torch.arange(LENGTH).expand(ROWS, LENGTH) >= LENGTH - (HIDDEN if kind == "pad" else 0)


def counted_by_a_user(
    routing_map: torch.Tensor, reduce_group: Any, topk: int | None = None, with_padding_mask: bool = False
) -> tuple[torch.Tensor, Any, Any]:
    """A repair of a user's own: this rank's tokens are counted before they are added up."""
    own = routing_map.sum(dim=0)
    number = own.sum() / topk
    every = own.clone()
    torch.distributed.all_reduce(every, group=reduce_group)
    return every, number, every.sum() / topk


def divided_in_place(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any, Any]:
    """Another one: what Megatron has counted of all ranks."""
    every, number, total = counting(*args, **kwargs)
    number /= kwargs["reduce_group"].size()
    return every, number, total


def attached_in_parts(self: Any, probs: Any, coefficient: float, loss: Any, *args: Any, **kwargs: Any) -> Any:
    """Another one: of the loss a part has a gradient."""
    part = loss / self.tp_cp_group.size()
    return attaching(self, probs, coefficient, part + (loss - part).detach(), *args, **kwargs)


def counting(*args: Any, **kwargs: Any) -> Any:
    return importlib.import_module("megatron.core.transformer.moe.moe_utils").get_tokens_per_expert_and_token_count(
        *args, **kwargs
    )


attaching = importlib.import_module(
    "megatron.core.transformer.moe.router"
).TopKRouter.attach_and_log_load_balancing_loss


class OwnScaler:
    """Another one."""

    backward = None

    @staticmethod
    def apply(activation: Any, loss: Any) -> Any:
        real = importlib.import_module("megatron.core.transformer.moe.moe_utils").MoEAuxLossAutoScaler
        return real.apply(activation, loss / parallel_state.get_tensor_model_parallel_world_size())


def divided(name: str) -> Any:
    """Another one: of what Megatron's own function gives, the last part."""
    real = operator.attrgetter(name)(importlib.import_module("megatron.core.transformer.moe.router"))

    def own(*args: Any, **kwargs: Any) -> Any:
        found, ranks = real(*args, **kwargs), parallel_state.get_tensor_model_parallel_world_size()
        return (found[0], found[1] / ranks) if isinstance(found, tuple) else found / ranks

    return own


def scaled_down(scale: torch.Tensor) -> None:
    """Another one, by the scale that Megatron's schedule sets."""
    scaling(scale / parallel_state.get_tensor_model_parallel_world_size())


def times_replicas(self: Any, kind: str) -> float:
    """A repair of a user's own of what is over all ranks."""
    return weighing(self, kind) * parallel_state.get_data_parallel_world_size()


def attached_times_replicas(self: Any, probs: Any, coefficient: float, loss: Any, *args: Any, **kwargs: Any) -> Any:
    """Another one."""
    replicas = parallel_state.get_data_parallel_world_size() if kwargs.get("reduce_group_has_dp") else 1
    return attaching(self, probs, coefficient * replicas, loss * replicas, *args, **kwargs)


def scores_times_replicas(function: Any) -> Any:
    """Another one, around Megatron's own: the scores, which are of the router's method the third argument."""

    def own(self: Any, probs: Any, scores: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, probs, scores * parallel_state.get_data_parallel_world_size(), *args, **kwargs)

    return own


def found_times_replicas(name: str, place: int) -> Any:
    """Another one, around a function of the router's module, if the release has it: one of what it gives."""
    real: Any = getattr(importlib.import_module("megatron.core.transformer.moe.router"), name, None)

    def own(*args: Any, **kwargs: Any) -> Any:
        found = list(real(*args, **kwargs))
        found[place] = found[place] * parallel_state.get_data_parallel_world_size()
        return tuple(found)

    return own


def scaled_up(scale: torch.Tensor) -> None:
    """Another one, by the scale that Megatron's schedule sets."""
    scaling(scale * parallel_state.get_data_parallel_world_size())


class ScalerUp:
    """Another one."""

    backward = None

    @staticmethod
    def set_loss_scale(scale: torch.Tensor) -> None:
        scaling(scale)

    @staticmethod
    def apply(activation: Any, loss: Any) -> Any:
        real = importlib.import_module("megatron.core.transformer.moe.moe_utils").MoEAuxLossAutoScaler
        return real.apply(activation, loss * parallel_state.get_data_parallel_world_size())


def by_the_coefficient(function: Any, group: str, divide: bool) -> Any:
    """Another one, around the router's method."""

    def own(self: Any, *args: Any, **kwargs: Any) -> Any:
        coefficient, ranks = self.config.moe_aux_loss_coeff, getattr(self, group).size()
        self.config.moe_aux_loss_coeff = coefficient / ranks if divide else coefficient * ranks
        try:
            return function(self, *args, **kwargs)
        finally:
            self.config.moe_aux_loss_coeff = coefficient

    return own


def with_hooks(group: str, divide: bool) -> Any:
    """Another one, by the coefficient, in hooks on the router."""

    def own(self: Any, *args: Any, **kwargs: Any) -> None:
        making(self, *args, **kwargs)
        coefficient, ranks = self.config.moe_aux_loss_coeff, getattr(self, group).size()
        times = coefficient / ranks if divide else coefficient * ranks
        self.register_forward_pre_hook(lambda *_: setattr(self.config, "moe_aux_loss_coeff", times))
        self.register_forward_hook(lambda *_: setattr(self.config, "moe_aux_loss_coeff", coefficient))

    return own


def without_a_group(self: Any, *args: Any, **kwargs: Any) -> None:
    """A router as of a caller whose groups are not all there."""
    making(self, *args, **kwargs)
    self.tp_dp_cp_group = None


weighing = importlib.import_module("megatron.core.transformer.moe.router").TopKRouter.get_aux_loss_coeff
router: Any = importlib.import_module("megatron.core.transformer.moe.router").TopKRouter
making, routing, forward, balancing = router.__init__, router.routing, router.forward, router._apply_global_aux_loss
scaling = importlib.import_module("megatron.core.transformer.moe.router").MoEAuxLossAutoScaler.set_loss_scale
USERS: dict[str, tuple[str, Any]] = {
    "loss": ("switch_load_balancing_loss_func", divided("switch_load_balancing_loss_func")),
    "scores": ("compute_routing_scores_for_aux_loss", divided("compute_routing_scores_for_aux_loss")),
    "scale": ("MoEAuxLossAutoScaler.set_loss_scale", staticmethod(scaled_down)),
    "routing": ("TopKRouter.routing", by_the_coefficient(routing, "tp_cp_group", divide=True)),
    "forward": ("TopKRouter.forward", by_the_coefficient(forward, "tp_cp_group", divide=True)),
    "forward up": ("TopKRouter.forward", by_the_coefficient(forward, "tp_dp_cp_group", divide=False)),
    "whole": ("TopKRouter._apply_global_aux_loss", scores_times_replicas(balancing)),
    "scores up": (
        "compute_routing_scores_for_aux_loss",
        found_times_replicas("compute_routing_scores_for_aux_loss", 1),
    ),
    "counts up": (
        "get_tokens_per_expert_and_token_count",
        found_times_replicas("get_tokens_per_expert_and_token_count", 0),
    ),
    "scale up": ("MoEAuxLossAutoScaler.set_loss_scale", staticmethod(scaled_up)),
    "scaler up": ("MoEAuxLossAutoScaler", ScalerUp),
    "hooks": ("TopKRouter.__init__", with_hooks("tp_cp_group", divide=True)),
    "hooks up": ("TopKRouter.__init__", with_hooks("tp_dp_cp_group", divide=False)),
    "alone": ("TopKRouter.__init__", without_a_group),
    "own": ("get_tokens_per_expert_and_token_count", counted_by_a_user),
    "place": ("get_tokens_per_expert_and_token_count", divided_in_place),
    "attach": ("TopKRouter.attach_and_log_load_balancing_loss", attached_in_parts),
    "weight": ("TopKRouter.get_aux_loss_coeff", times_replicas),
    "replicas": ("TopKRouter.attach_and_log_load_balancing_loss", attached_times_replicas),
    "scaler": ("MoEAuxLossAutoScaler", OwnScaler),
}
"""What a user who has met the bug puts into the router's module."""
watching = True
"""Whether what is logged is looked at: by a function in place of the router's."""


def gradient(
    loss: str, per_token: bool, micro_batch: int, masked: str = "", counted: str = ""
) -> dict[str, list[float]]:
    """Of the routers and the norms, as the optimizer gets them."""
    if counted:
        module = importlib.import_module("megatron.core.transformer.moe.router")
        name, own = USERS[counted]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"{module.__name__}.{name}", own)
            return gradient(loss, per_token, micro_batch, masked)
    model = model_of(loss, per_token)
    logged: list[float] = []
    for layer in model.module.decoder.layers:
        router = layer.mlp.router
        if not watching:
            continue
        router.attach_and_log_load_balancing_loss = watched(router.attach_and_log_load_balancing_loss, logged)
    batches = zip(*(part(of).split(micro_batch) for of in (tokens(), mask(masked))), strict=True)

    def forward_step(iterator: Iterator[Any], model: Any) -> Any:
        chosen, hidden = next(iterator)
        losses = model(chosen, None, None, labels=chosen, **({"padding_mask": hidden} if masked else {}))

        def loss_of(output: Any) -> Any:
            number = (~hidden).sum().int()
            return (output.sum() * 0, number, {}) if per_token else (output.mean() * 0, {})

        return losses, loss_of

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=batches,
        model=model,
        num_microbatches=len(part(tokens())) // micro_batch,
        seq_length=LENGTH,
        micro_batch_size=micro_batch,
        forward_only=False,
    )
    return {
        **{name: one.main_grad.flatten().tolist() for name, one in megatron_gpt.named([model]) if looked_at(name)},
        LOGGED: logged,
    }


def watched(attach: Any, logged: list[float]) -> Any:
    """What is logged; by a function that is taken for whose method it is called before."""

    def own(probs: Any, coefficient: float, loss: Any, *args: Any, **kwargs: Any) -> Any:
        logged.append((loss / coefficient).item())
        return attach(probs, coefficient, loss, *args, **kwargs)

    return FunctionType(own.__code__, {"__name__": attach.__func__.__globals__["__name__"]}, closure=own.__closure__)


def noted(gating: Any, logits: list[torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
    logits.append(gating(hidden))
    return logits[-1]


def looked_at(name: str) -> bool:
    return "router" in name or "norm.weight" in name


def reference(loss: str, micro_batch: int, masked: str = "") -> dict[str, list[float]]:
    """In float64, the whole model on one rank: the mean over micro-batches of our own formulas."""
    model = model_of(loss, False).module.double()
    routers = [layer.mlp.router for layer in model.decoder.layers]
    logits: list[torch.Tensor] = []
    for router in routers:
        router.config.moe_aux_loss_coeff, router.config.moe_z_loss_coeff = 0.0, None
        router.gating = functools.partial(noted, router.gating, logits)
    batches = tokens().split(micro_batch)
    valid = LENGTH - (HIDDEN if masked == "pad" else 0)
    total = torch.zeros((), dtype=torch.float64)
    before: list[torch.Tensor] = [torch.zeros(EXPERTS)] * len(routers)
    for number, batch in enumerate(batches, 1):
        logits.clear()
        model(batch, None, None)
        assert all(one.dtype is torch.float64 for one in logits)
        seen = [one.view(LENGTH, len(batch), EXPERTS)[:valid] for one in logits]
        if loss == "global":  # the shares of tokens are the mean over the micro-batches so far
            before = [sum_of + shares(one) for sum_of, one in zip(before, seen, strict=True)]
            losses = [balance(one, sum_of / number) for sum_of, one in zip(before, seen, strict=True)]
        else:
            losses = [FORMULAS[loss](one) for one in seen]
        total = total + torch.stack(losses).sum() / len(batches)
    named = {name: one for name, one in model.named_parameters() if looked_at(name)}
    found = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    return {
        name: (torch.zeros_like(one) if of is None else of).flatten().tolist()
        for (name, one), of in zip(named.items(), found, strict=True)
    }


def shares(logits: torch.Tensor) -> torch.Tensor:
    """Of each expert, its share of all choices."""
    logits = logits.reshape(-1, EXPERTS)
    return torch.zeros_like(logits).scatter(-1, logits.topk(TOPK).indices, 1.0).mean(0) / TOPK


def balance(logits: torch.Tensor, of_tokens: torch.Tensor | None = None) -> torch.Tensor:
    """The Switch Transformer's: experts times the sum over them of share of tokens and mean probability."""
    of_tokens = shares(logits) if of_tokens is None else of_tokens
    return COEFFICIENT * EXPERTS * (of_tokens * logits.reshape(-1, EXPERTS).softmax(-1).mean(0)).sum()


FORMULAS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "aux": balance,
    "seq": lambda logits: torch.stack([balance(row) for row in logits.unbind(1)]).mean(),
    "z": lambda logits: COEFFICIENT * (logits.logsumexp(-1) ** 2).mean(),
}


def main() -> None:
    parser = states.parser()
    parser.add_argument("--patch")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument(
        "cases",
        nargs="+",
        help="LOSS/token or mean/MICRO_BATCH[/mask or /pad[/USER]]; LOSS/MICRO_BATCH[/pad] of the reference",
    )
    options = parser.parse_args()
    global watching
    watching = options.patch != "megatron-core-moe-auxiliary-padding"
    torch.compiler.set_stance("force_eager")
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=options.tp, context_parallel_size=options.cp)
    model_parallel_cuda_manual_seed(1)
    megatron_gpt.let_experts_run()
    if options.patch is None:
        cases = [case.split("/") for case in options.cases]
        found = {"/".join(case): reference(case[0], int(case[1]), *case[2:]) for case in cases}
        (options.out / "rank0.json").write_text(json.dumps(found))
        return

    def observe(names: list[str]) -> Case:
        cases = [name.split("/") for name in names]
        return {"/".join(case): gradient(case[0], case[1] == "token", int(case[2]), *case[3:]) for case in cases}

    states.report_cases(options.patch, observe, options.cases, options.out)
