"""slime on Megatron: the third bound of dual-clip PPO is the one that was asked for."""

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
    """``--eps-clip-c``; empty where there is none, or one that slime's function refuses in the middle of a step.

    Empty as well where the function is one of the user's own, in place of slime's.
    """
    asked: Any = getattr(args, "eps_clip_c", None)
    if asked is None or not _takes_a_bound(function):
        return ()
    if not _is_a_bound(asked):
        _ignored(str(asked))
        return ()
    return (asked,)


def _is_a_bound(asked: Any) -> bool:
    """A number above 1: NaN is none, and no more is a text, such as 1e1 of a configuration in YAML."""
    try:
        return bool(asked > 1.0)
    except (TypeError, ValueError, RuntimeError):
        return False


def _takes_a_bound(function: Callable[..., Any]) -> bool:
    """Slime's own, within torch.compile's wrapper: one of the user's may have a bound already, whatever it takes."""
    # In the globals of what was decorated there is another module's name, whatever attributes it has copied.
    while _released.written_in(function).startswith("torch.") and hasattr(function, "_torchdynamo_orig_callable"):
        function = function._torchdynamo_orig_callable
    # known: slime's own, by what no decorator copies
    if _released.written_in(function) != _MODULE or not isinstance(function, FunctionType):
        return False
    code = function.__code__  # known: slime's function was read; in every release that has it
    return code.co_varnames[: code.co_argcount][4:5] == ("eps_clip_c",)  # known: the name is in the fifth place


@functools.cache
def _ignored(asked: str) -> None:
    logger.warning("--eps-clip-c %s is ignored, as slime has always done: expected a number above 1, or none", asked)


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
    bug="--eps-clip-c clips nothing",
    when="--eps-clip-c, and tokens with a negative advantage and a large ratio",
    symptom="""\
`--eps-clip-c` changes nothing. Tokens with a negative advantage that have become far more likely since they were
sampled (a large ratio) dominate the loss and its gradient, which is what dual-clip PPO is there to prevent.""",
    cause="`policy_loss_function` calls `compute_policy_loss` without it, whose default is None: no bound.",
    repair="""\
It is passed on. Where the advantage A is negative, the loss of a token is at most -c A: the objective is
max(min(r A, clip(r, 1 - eps, 1 + eps_high) A), c A), equation 5 of arXiv 1912.09729, with a gradient of 0 beyond r = c.
Without the option nothing changes. A c that is no number above 1, which slime's function refuses with an error, is
ignored as released, with a warning.

Left alone: a `compute_policy_loss` of your own in slime's place, or around it, which may have a bound already; the FSDP
backend of 0.2.0 to 0.2.2, which has the same call. main has been repaired since, and calls itself 0.3.1 all the same:
there the patch is refused, because the code is not that of 0.3.1, and is not needed.""",
    references=(
        "https://github.com/THUDM/slime/pull/2247",
        "https://arxiv.org/abs/1912.09729",
    ),
    variants=(
        # The tag v0.1.0 calls itself 0.0.1 in its metadata. No code is that of both.
        Variant(Guard("slime", "==0.0.1"), _forward('old_log_probs = batch["log_probs"]')),
        Variant(Guard("slime", ">=0.2.0,<=0.3.1"), _forward("args.use_rollout_logprobs")),
    ),
    obsolete_when="when the oldest slime in use has it: main since August 2026, which still calls itself 0.3.1",
    changes_numbers="""\
Every release up to 0.3.1 has ignored --eps-clip-c. A run that was started with it has been trained on PPO's loss
without that bound, and with the patch is trained on the one it asked for; to go on as before, leave the option out.
Checkpoints can be trained on.""",
    conditions=(
        Condition(
            "slime.backends.megatron_utils.loss:policy_loss_function", f"{__package__}._conditions:without_eps_clip_c"
        ),
    ),
)
