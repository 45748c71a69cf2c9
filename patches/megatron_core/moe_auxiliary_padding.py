"""megatron-core: load balancing under ``calculate_per_token_loss``, with a padding mask."""

from __future__ import annotations

from typing import Any

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

from .. import _hooks, _released
from . import _load_balancing

_ATTACH = "megatron.core.transformer.moe.router:TopKRouter.attach_and_log_load_balancing_loss"
_NAME = "megatron-core-moe-auxiliary-padding"
_MARK = "_rlhf_patches_of_all_ranks"
_UNMARKED = object()
_MEGATRON = ("megatron",)
_SCALING = (
    "forward",
    "routing",
    "attach_and_log_load_balancing_loss",
    "get_aux_loss_coeff",
    "_apply_aux_loss",
    "_apply_seq_aux_loss",
    "_apply_global_aux_loss",
)
_SCORING = ("compute_routing_scores_for_aux_loss", "switch_load_balancing_loss_func")
"""Functions of the router's module."""


def of_all_ranks(tokens: Any, own: Any, every: Any) -> Any:
    """The number itself, a tensor that Megatron counted, marked if it covers all ranks of the loss.

    Args:
        tokens: the number.
        own: for each expert the tokens that the number was counted from.
        every: the same for all ranks; Megatron has written their sum into ``own``, a user's code may not have.
    """
    return _mark(tokens) if own.data_ptr() == every.data_ptr() else tokens


def _mark(tokens: Any) -> Any:
    setattr(tokens, _MARK, _version(tokens))  # writes: a tensor that Megatron has just created
    return tokens


def of_rows(tokens: Any, rows: int) -> Any:
    """The number of tokens of several rows, marked if the number of one row is."""
    every = tokens * rows
    return _mark(every) if _marked(tokens) else every


def ranks_of(router: Any, scaler: Any, tokens: Any, group: Any) -> int:
    """The number of ranks that a number of tokens must be multiplied by. A number that a user counted has no mark.

    It is as released if a user's own code may already divide the loss by them.

    Args:
        router: the router whose losses are scaled.
        scaler: the class that attaches them.
        tokens: the number.
        group: the ranks that share a sequence.
    """
    ranks = int(group.size())
    if ranks == 1 or not _marked(tokens):
        return ranks
    other = replaced(router, scaler)
    if other:
        _released.stays(_NAME, f"{other} is not Megatron's own", "load balancing")
    return ranks if other else 1


def replaced(router: Any, scaler: Any = None, *more: str) -> str:
    """The first function of those that scale a router's losses, or hook, that is a user's; empty if none is."""
    other = _released.others(router, *_SCALING, packages=_MEGATRON)
    return other or _load_balancing.replaced(*_SCORING, *more, scaler=scaler) or _hooks.others(router)


def _marked(tokens: Any) -> bool:
    """Whether a number is as it was counted: a number that a user has divided in place is not."""
    return bool(getattr(tokens, _MARK, _UNMARKED) == _version(tokens))


def _version(tokens: Any) -> Any:
    try:
        return tokens._version
    except (AttributeError, RuntimeError):  # not a tensor, or an inference tensor, whose losses have no gradient
        return None


PATCH = Patch(
    name=_NAME,
    summary="load balancing has the configured weight with a padding mask, too",
    harm="wrong gradient",
    bug="with a padding mask, load balancing is too strong by a factor of TP x CP",
    when="--calculate-per-token-loss, a mixture of experts, a padding mask, and TP or CP",
    excluded_by=("calculate_per_token_loss=false",),
    symptom="""\
With `--calculate-per-token-loss` and a `padding_mask` argument of the model, the load balancing losses (`aux_loss`,
`seq_aux_loss`, `global_aux_loss`) of a mixture of experts are too large by a factor of TP x CP: with TP 4 and CP 2,
they have eight times the configured coefficient. The router uses the experts evenly, at the cost of the language
model's loss. No error is raised. The logged losses are right.""",
    cause="""\
With this option, each gradient is divided by the number of all tokens at the end of a step, so the router multiplies
its losses by the number of tokens. Since 0.19.0, it uses this rank's tokens times the ranks that share a sequence. With
a mask, `get_tokens_per_expert_and_token_count` counts this rank's tokens too late: the all-reduce over the tokens of
each expert has already written into the tensor that they are counted from, so the number covers all ranks. Up to
0.18.2, the number was not multiplied by the ranks, and was right with a mask only
(`megatron-core-moe-auxiliary-per-token`).""",
    repair="""\
With a mask, the patch does not multiply the number by the ranks again. The gradient then equals that of one rank, also
if ranks have unequal numbers of valid tokens.

Without a mask, without `--calculate-per-token-loss`, and with TP and CP of 1, results are bitwise identical. The number
is not affected if your own router or repair counts it on each rank, or divides it. The z-loss, which is right with a
mask, is not affected.

The patch does not change a router if its functions for these losses, including `routing` and `forward`, or
`MoEAuxLossAutoScaler`, `compute_routing_scores_for_aux_loss` or `switch_load_balancing_loss_func`, are not Megatron's
own, or if it has a hook of yours, because they may divide the loss. Rank 0 logs one warning then, if it has such a
router. It does not repair the `global_aux_loss` coefficient, which without a mask is 1 / DP of the configured one:
`megatron-core-moe-auxiliary-global` repairs that.""",
    references=("https://github.com/NVIDIA/Megatron-LM/issues/7452",),
    variants=(
        # main had version 0.20.0 on 2026-08-22, and had the defect.
        Variant(
            Guard("megatron-core", ">=0.19.0,<=0.20.0"),
            (
                Rewrite(
                    target="megatron.core.transformer.moe.moe_utils:get_tokens_per_expert_and_token_count",
                    pattern="local_num_tokens = local_tokens_per_expert.sum() / topk",
                    replacement="local_num_tokens = $OF_ALL_RANKS("
                    "local_tokens_per_expert.sum() / topk, local_tokens_per_expert, global_tokens_per_expert)",
                    uses={"OF_ALL_RANKS": f"{__name__}:{of_all_ranks.__name__}"},
                ),
                Rewrite(
                    target="megatron.core.transformer.moe.router:TopKRouter._apply_seq_aux_loss",
                    pattern="local_num_tokens * bsz",
                    replacement="$OF_ROWS(local_num_tokens, bsz)",
                    uses={"OF_ROWS": f"{__name__}:{of_rows.__name__}"},
                ),
                Rewrite(
                    target=_ATTACH,
                    pattern="MoEAuxLossAutoScaler.apply("
                    "activation, aux_loss * num_local_tokens * self.tp_cp_group.size())",
                    replacement="MoEAuxLossAutoScaler.apply("
                    "activation, aux_loss * num_local_tokens * "
                    "$RANKS_OF(self, MoEAuxLossAutoScaler, num_local_tokens, self.tp_cp_group))",
                    uses={"RANKS_OF": f"{__name__}:{ranks_of.__name__}"},
                ),
            ),
        ),
    ),
    obsolete_when="when a release of megatron-core counts a rank's tokens before it sums them over ranks",
    conditions=(Condition(_ATTACH, f"{__package__}._conditions:tokens_of_all_ranks", "weight x"),),
    changes_numbers="""\
In megatron-core 0.19.0 to 0.19.2, with `--calculate-per-token-loss` and a padding mask, load balancing had TP x CP
times the configured weight. With the patch, it has the configured weight. To keep the balance of a run that was
tuned without the patch, multiply its coefficients by that factor. Restore coefficients that you have divided by the
factor.""",
)
