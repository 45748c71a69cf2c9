"""FSDP1's mixed-precision policies that accelerate makes itself, and the type to which they would cast buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from .. import _float32_buffers, _released

NAME = "accelerate-fsdp1-rotary-precision"
HALF = ("torch.bfloat16", "torch.float16")
# Attributes, as copies of a plugin have them, too.
_MADE, _RELEASED = "_rlhf_patches_made", "_rlhf_patches_released"


def made(policy: Any) -> Any:
    """A policy that accelerate has just made; marked, if parameters and buffers get the same half precision.

    Args:
        policy: a ``torch.distributed.fsdp.MixedPrecision``, or FSDP2's, which has no type for buffers.

    Returns:
        The same policy.
    """
    if str(getattr(policy, "buffer_dtype", None)) in HALF and policy.buffer_dtype == policy.param_dtype:
        setattr(policy, _MADE, policy.buffer_dtype)  # writes: on accelerate's own object, and no field of it
    return policy


def as_released(policy: Any) -> Any:
    """The policy that accelerate has made, from it or from ours in its place; None for any other, or if changed."""
    if hasattr(policy, _RELEASED):
        released = getattr(policy, _RELEASED)
        return released if policy == _without_buffers(released) else None
    own = getattr(policy, _MADE, None)
    return policy if own is not None and own == policy.param_dtype == policy.buffer_dtype else None


def for_model(wrapped: Callable[..., None], plugin: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Around ``set_auto_wrap_policy(self, model)``, after which the plugin's policy is read to wrap this model.

    FSDP1 leaves the buffers alone if transformers keeps each one that it would cast in float32. Otherwise it casts all.
    """
    released = as_released(plugin.mixed_precision_policy)
    if released is not None:
        kept = _leaves_buffers(args[0], released.param_dtype)
        if kept != hasattr(plugin.mixed_precision_policy, _RELEASED):
            # writes: this is the repair
            plugin.mixed_precision_policy = _without_buffers(released) if kept else released
    return wrapped(*args, **kwargs)


def _without_buffers(released: Any) -> Any:
    policy = copy.copy(released)
    policy.buffer_dtype = None  # writes: to the copy
    setattr(policy, _RELEASED, released)  # writes: to the copy
    return policy


def _leaves_buffers(model: Any, dtype: Any) -> bool:
    others = _float32_buffers.others(model, dtype)
    if not others:
        return bool(_float32_buffers.known(model))
    if _float32_buffers.known(model) or _float32_buffers.unknown(model):
        _released.stays(NAME, f"{others[0]} may have to be cast", "the precision of rotary frequencies")
    return False
