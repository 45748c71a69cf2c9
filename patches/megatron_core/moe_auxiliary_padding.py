"""megatron-core: a mixture's load balancing under ``calculate_per_token_loss``, with a padding mask."""

from __future__ import annotations

import sys
from typing import Any

from rlhf_patches import Guard, Patch, Rewrite, Variant

from .. import _released

_NAME = "megatron-core-moe-auxiliary-padding"
_MARK = "_rlhf_patches_of_all_ranks"
_UNMARKED = object()
_MEGATRON = ("megatron",)
_SCALING = (
    "routing",
    "attach_and_log_load_balancing_loss",
    "get_aux_loss_coeff",
    "_apply_aux_loss",
    "_apply_seq_aux_loss",
    "_apply_global_aux_loss",
)
_SCORING = ("compute_routing_scores_for_aux_loss", "switch_load_balancing_loss_func")
"""Functions of the router's module."""
_ATTACHING = ("forward", "backward", "set_loss_scale")


def of_all_ranks(tokens: Any, own: Any, every: Any) -> Any:
    """The number itself, a tensor of Megatron's own counting, marked if it is that of all the loss's ranks.

    Args:
        tokens: the number.
        own: of each expert the tokens that it was counted from.
        every: the same of all ranks: their sum has been written into ``own``, or a user's was not.
    """
    return _mark(tokens) if own.data_ptr() == every.data_ptr() else tokens


def _mark(tokens: Any) -> Any:
    setattr(tokens, _MARK, _version(tokens))  # writes: a tensor that Megatron has just made
    return tokens


def of_rows(tokens: Any, rows: int) -> Any:
    """The number of tokens of several rows, marked if that of one is."""
    every = tokens * rows
    return _mark(every) if _marked(tokens) else every


def ranks_of(router: Any, scaler: Any, tokens: Any, group: Any) -> int:
    """By how many ranks a number of tokens is to be multiplied. One that a user has counted has no mark.

    As released where a user's own code may divide the loss by them already.

    Args:
        router: whose losses are scaled.
        scaler: the class by which they are attached.
        tokens: the number.
        group: the ranks that share a sequence.
    """
    ranks = int(group.size())
    if ranks == 1 or not _marked(tokens):
        return ranks
    other = _released.others(router, *_SCALING, packages=_MEGATRON) or _replaced(scaler)
    if other:
        _released.stays(_NAME, f"{other} is not Megatron's own", "load balancing")
    return ranks if other else 1


def _replaced(scaler: Any) -> str:
    """What of the functions of the router's module, and of the class that attaches losses, is a user's."""
    module = sys.modules.get("megatron.core.transformer.moe.router")
    for name in _SCORING:
        if not _released.is_released(getattr(module, name, None), _MEGATRON):
            return name
    # known: nothing but a class of Megatron's own has its module's name, and it takes torch's `apply`
    own = str(getattr(scaler, "__module__", "")).startswith("megatron.") and "apply" not in vars(scaler)
    if own and all(_released.is_released(getattr(scaler, name), _MEGATRON) for name in _ATTACHING):
        return ""
    return "MoEAuxLossAutoScaler"


def _marked(tokens: Any) -> bool:
    """Whether a number is as it was counted: what a user has divided in place is another one."""
    return bool(getattr(tokens, _MARK, _UNMARKED) == _version(tokens))


def _version(tokens: Any) -> Any:
    try:
        return tokens._version
    except (AttributeError, RuntimeError):  # no tensor, or one of inference, whose losses are not differentiated
        return None


PATCH = Patch(
    name=_NAME,
    summary="a mixture's load balancing has the weight that was set with a padding mask, too",
    harm="wrong gradient",
    bug="with a padding mask load balancing is too strong, by TP x CP",
    when="--calculate-per-token-loss, a mixture of experts, a padding mask, and TP or CP",
    excluded_by=("calculate_per_token_loss=false",),
    symptom="""\
With `--calculate-per-token-loss` and a `padding_mask` that the model is called with, a mixture's load balancing losses
(`aux_loss`, `seq_aux_loss`, `global_aux_loss`) count TP x CP times too much: with TP 4 and CP 2 eight times the
coefficient that was set. Experts are used evenly, and the language model's loss suffers. No error; the losses that are
logged are right.""",
    cause="""\
Under that option each gradient is divided by the number of all tokens at the end of a step, so the router multiplies
its losses by the number of tokens: since 0.19.0 by those of this rank, times the ranks that share a sequence. With a
mask `get_tokens_per_expert_and_token_count` counts this rank's tokens too late. The all-reduce that adds up the tokens
of each expert has written into the tensor that they are counted from, so the number is that of all ranks. To 0.18.2 it
was not multiplied by the ranks, and was right with a mask alone (`megatron-core-moe-auxiliary-per-token`).""",
    repair="""\
With a mask the number is not multiplied by the ranks once more. The gradient is then that of one rank, also where ranks
have unequal numbers of valid tokens.

Without a mask, without `--calculate-per-token-loss`, and with TP and CP of 1, all is bit for bit as before. So is a
number of tokens that a router of your own, or a repair of yours, counts on each rank or divides; and the z-loss, which
is right with a mask. Left alone, with one line: a router whose functions for these losses, its `routing` among them, or
whose `MoEAuxLossAutoScaler`, `compute_routing_scores_for_aux_loss` or `switch_load_balancing_loss_func` are not
Megatron's own, and may divide the loss. So, without a line, is `global_aux_loss`, which has, without a mask, 1 / DP of
its coefficient: `megatron-core-moe-auxiliary-global` repairs it.""",
    references=("https://github.com/NVIDIA/Megatron-LM/issues/7452",),
    variants=(
        # main called itself 0.20.0 when it was read (2026-08-22) and had the defect.
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
                    target="megatron.core.transformer.moe.router:TopKRouter.attach_and_log_load_balancing_loss",
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
    obsolete_when="when a release of megatron-core counts a rank's tokens before it adds them up",
    changes_numbers="""\
In megatron-core 0.19.0 to 0.19.2, with `--calculate-per-token-loss` and a padding mask, load balancing had TP x CP
times the weight that was set. With the patch it has that weight. A run that was tuned with it has the balance that it
had with coefficients multiplied by that number. Coefficients that were divided by it have to be made whole again.""",
)
