"""slime on Megatron: dual-clip PPO uses the configured third bound."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import FunctionType
from typing import Any

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

from .. import _released

logger = logging.getLogger("rlhf_patches")

_MODULE = "slime.utils.ppo_utils"


def bound(args: Any, function: Callable[..., Any]) -> tuple[float, ...]:
    """``--eps-clip-c``; empty if it is absent, or if slime's function would raise for it in the middle of a step.

    Also empty if the function is a user's, in place of slime's.
    """
    asked: Any = getattr(args, "eps_clip_c", None)
    if asked is None or not _takes_a_bound(function):
        return ()
    if not _is_a_bound(asked):
        _ignored(str(asked))
        return ()
    return (asked,)


def _is_a_bound(asked: Any) -> bool:
    """Whether it is a number above 1; NaN is not, nor is a string, such as 1e1 of a configuration in YAML."""
    try:
        return bool(asked > 1.0)
    except (TypeError, ValueError, RuntimeError):
        return False


def _takes_a_bound(function: Callable[..., Any]) -> bool:
    """Whether it is slime's own, in torch.compile's wrapper; a user's may have a bound already."""
    # The globals of a decorated function have another module's name, whatever attributes it copies. Each wrapper sets
    # `__wrapped__` itself; a user's copies what torch.compile has set, and torch's others copy it from there.
    while _released.written_in(function).startswith("torch.") and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    # known: slime's own, from attributes that no decorator copies
    if _released.written_in(function) != _MODULE or not isinstance(function, FunctionType):
        return False
    code = function.__code__  # known: slime's function was read in every release that has it
    return code.co_varnames[: code.co_argcount][4:5] == ("eps_clip_c",)  # known: the name is in the fifth place


@functools.cache
def _ignored(asked: str) -> None:
    logger.warning("--eps-clip-c %s is ignored, as in released slime: expected a number above 1, or none", asked)


def _forward(alongside: str) -> tuple[Rewrite]:
    call = "compute_policy_loss(ppo_kl, advantages, args.eps_clip, args.eps_clip_high"
    return (
        Rewrite(
            target="slime.backends.megatron_utils.loss:policy_loss_function",
            pattern=f"{call})",
            alongside=(alongside,),
            replacement=f"{call}, *$BOUND(args, compute_policy_loss))",
            uses={"BOUND": f"{__name__}:{bound.__name__}"},
        ),
    )


PATCH = Patch(
    name="slime-eps-clip-c",
    summary="--eps-clip-c clips the policy loss",
    harm="wrong gradient",
    bug="--eps-clip-c has no effect",
    when="--eps-clip-c, and tokens with a negative advantage and a large ratio",
    symptom="""\
`--eps-clip-c` has no effect. Tokens with a negative advantage that have become far more likely since they were sampled
(a large ratio) dominate the loss and its gradient. Dual-clip PPO is meant to prevent this.""",
    cause="`policy_loss_function` does not pass it to `compute_policy_loss`, whose default is None: no bound.",
    repair="""\
The patch passes it on. If the advantage A is negative, the loss of a token is at most -c A: the objective is max(min(r
A, clip(r, 1 - eps, 1 + eps_high) A), c A), equation 5 of arXiv 1912.09729, with a gradient of 0 beyond r = c. Without
the option, nothing changes. If c is not a number above 1, slime's function would raise an error; the patch ignores such
a c, as released, and logs a warning.

The patch does not change your own `compute_policy_loss` in place of slime's, or a wrapper of slime's, which may have a
bound already. It does not repair the FSDP backend of 0.2.0 to 0.2.2, which has the same call. main has the repair and
still has version 0.3.1: the patch is refused there because its code is not that of 0.3.1, and is not needed.""",
    references=(
        "https://github.com/THUDM/slime/pull/2247",
        "https://arxiv.org/abs/1912.09729",
    ),
    variants=(
        # The tag v0.1.0 has version 0.0.1 in its metadata. No code matches both variants.
        Variant(Guard("slime", "==0.0.1"), _forward('old_log_probs = batch["log_probs"]')),
        Variant(Guard("slime", ">=0.2.0,<=0.3.1"), _forward("args.use_rollout_logprobs")),
    ),
    obsolete_when="when the oldest slime in use has the repair: main since August 2026, still with version 0.3.1",
    changes_numbers="""\
Every release up to 0.3.1 ignores --eps-clip-c. A run with this option was trained on PPO's loss without the bound, and
with the patch is trained with it. To keep the loss without the bound, remove the option. Training can continue from
checkpoints.""",
    conditions=(
        Condition(
            "slime.backends.megatron_utils.loss:policy_loss_function", f"{__package__}._conditions:without_eps_clip_c"
        ),
    ),
)
