"""megatron-core: the global load balancing loss, whose sum over data-parallel ranks is averaged."""

from __future__ import annotations

from typing import Any

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

from .. import _hooks, _released
from . import _load_balancing

_NAME = "megatron-core-moe-auxiliary-global"
# verl (for its router replay) and mcore-bridge have their own `routing`, which passes the loss on.
_MEGATRON = ("megatron", "mcore_bridge", "verl", "rlhf_patches")
_WEIGHING = (
    *("forward", "routing", "get_aux_loss_coeff", "is_aux_loss_enabled"),
    *("_apply_global_aux_loss", "attach_and_log_load_balancing_loss"),
)
_OF_MODULE = (
    *("switch_load_balancing_loss_func", "compute_routing_scores_for_aux_loss"),
    *("get_tokens_per_expert_and_token_count", "reduce_from_tensor_model_parallel_region"),
)
"""Functions of the router's module, in one release or another."""


def is_megatrons(router: Any) -> bool:
    """Whether there is this loss, and its weight is Megatron's own: a user's may already be multiplied by the ranks.

    A router without the loss may have no groups.
    """
    groups = (getattr(router, name, None) for name in ("tp_dp_cp_group", "tp_cp_group"))
    if "global_aux_loss" not in (getattr(router, "routing_type", None) or ()) or None in groups:
        return False
    other = replaced(router)
    if other:
        _released.stays(_NAME, f"{other} is not Megatron's own", "load balancing")
    return not other


def replaced(router: Any) -> str:
    """The first function of those that weigh, compute or attach the loss, or hook, that is a user's; else empty."""
    # known: from attributes that no decorator copies
    other = _released.others(router, *_WEIGHING, packages=_MEGATRON) or _load_balancing.replaced(*_OF_MODULE)
    return other or _hooks.others(router)


_TARGET = "megatron.core.transformer.moe.router:TopKRouter._apply_global_aux_loss"
_OF = 'self.get_aux_loss_coeff("global_aux_loss")'
_REPLICAS = "self.tp_dp_cp_group.size() // self.tp_cp_group.size()"
# Per token, with a padding mask, the loss is multiplied by a number of tokens that already covers all ranks.
_OF_A_MASK = f"(1 if with_padding_mask and self.calculate_per_token_loss else {_REPLICAS})"

# How tokens are counted, before and since the router supports padding masks.
_OF_ALL = "num_tokens * self.tp_dp_cp_group.size()"
_OF_VALID = "get_tokens_per_expert_and_token_count($$$ARGUMENTS)"


def _weighed(replicas: str, counted: str) -> tuple[Rewrite, ...]:
    """The logged value is divided by the same coefficient, and is as before."""
    return (
        Rewrite(
            target=_TARGET,
            pattern=f"global_aux_loss_coeff = {_OF}",
            replacement=f"global_aux_loss_coeff = {_OF} * ({replicas} if $IS_MEGATRONS(self) else 1)",
            alongside=(counted,),
            uses={"IS_MEGATRONS": f"{__name__}:{is_megatrons.__name__}"},
        ),
    )


PATCH = Patch(
    name=_NAME,
    summary="global_aux_loss has the configured weight for any number of data-parallel ranks",
    harm="wrong gradient",
    bug="load balancing with global_aux_loss is too weak, by a factor of the data-parallel ranks",
    when="global_aux_loss (Qwen3-Next's and Qwen3.5's default in Megatron-Bridge) and data parallelism",
    excluded_by=("moe_router_load_balancing_type=aux_loss|seq_aux_loss|sinkhorn|none",),
    symptom="""\
With `--moe-router-load-balancing-type global_aux_loss`, which Megatron-Bridge sets for Qwen3-Next and Qwen3.5, load
balancing of a mixture of experts has 1 / DP of the configured coefficient (`moe_aux_loss_coeff`): with 64 data-parallel
ranks, it has hardly any effect. The gradient of the same global batch depends on the number of data-parallel ranks, and
experts become more and more unbalanced. No error is raised. The logged loss is right.""",
    cause="""\
`_apply_global_aux_loss` divides by the tokens of all data-parallel ranks, so a rank's loss is its part of the whole,
and the sum over ranks is the loss. But gradients are averaged over those ranks, as for the other losses, for which each
rank has the whole loss. Under `--calculate-per-token-loss`, gradients are divided by the tokens of all ranks, while the
router multiplies by those of one rank.""",
    repair="""\
The patch multiplies the coefficient by the number of data-parallel ranks. The gradient then equals that of one rank
that has all ranks' rows in its micro-batches. The logged value is divided by the same number, and is as before.

With one data-parallel rank, for the other balancing losses and for the z-loss, results are bitwise identical.
`--calculate-per-token-loss` with a padding mask is not affected: its number of tokens is already that of all ranks as
released.

The patch does not change a router if one of the functions that weigh, compute or attach this loss, including `routing`
and `forward`, is your own, or if it has a hook of yours, because it may have the repair. Rank 0 logs one warning then,
if it has such a router. The patch does not recognize a repair in your own plugin of rlhf-patches: disable the patch if
you use such a plugin.

The patch does not repair that each expert's share of tokens covers the micro-batches so far in a step, or that ranks
count as having equal numbers of tokens without a mask.""",
    changes_numbers="""\
Since megatron-core 0.15.0, `global_aux_loss` had 1 / DP of the configured weight; all other gradients were right. With
the patch, it has the full weight. To keep the balance of a run that was tuned without the patch, divide its coefficient
by the number of data-parallel ranks.""",
    references=(
        "https://github.com/NVIDIA/Megatron-LM/issues/3672",
        "https://github.com/NVIDIA/Megatron-LM/pull/5007",
    ),
    variants=(
        Variant(Guard("megatron-core", ">=0.15.0rc3,<0.16.0"), _weighed(f"({_REPLICAS})", _OF_ALL)),
        # main had version 0.20.0 on 2026-08-22, and had the defect; the newest tag was core_v0.19.0.
        Variant(Guard("megatron-core", ">=0.16.0,<=0.20.0"), _weighed(_OF_A_MASK, _OF_VALID)),
    ),
    obsolete_when=(
        "when a release of megatron-core multiplies global_aux_loss by the data-parallel ranks; none so far does"
    ),
    conditions=tuple(  # the latter where the router knows no padding mask
        Condition(_TARGET, f"{__package__}._conditions:{predicate}", "weight x")
        for predicate in ("weight_of_one_replica", "weight_of_one_replica_without_masks")
    ),
)
