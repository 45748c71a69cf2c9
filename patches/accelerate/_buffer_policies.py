"""FSDP1's mixed-precision policies that accelerate makes itself, and the type to which they would cast buffers."""

from __future__ import annotations

import weakref
from typing import Any

from .. import _float32_buffers, _released

NAME = "accelerate-fsdp1-rotary-precision"
HALF = ("torch.bfloat16", "torch.float16")
_made: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""By identity, as they compare by value: policies without a type for buffers, whose parameters have the same type."""


def without_buffers(policy: Any) -> Any:
    """A policy that accelerate has just made, without a type for buffers, which FSDP1 then leaves alone.

    Args:
        policy: a ``torch.distributed.fsdp.MixedPrecision``, or FSDP2's, which has no such type.

    Returns:
        The same policy.
    """
    if str(getattr(policy, "buffer_dtype", None)) in HALF and policy.buffer_dtype == policy.param_dtype:
        policy.buffer_dtype = None  # writes: this is the repair
        _made[id(policy)] = policy
    return policy


def is_made(policy: Any) -> bool:
    """Whether accelerate has made this policy, and would cast buffers by it as released."""
    return policy is not None and _made.get(id(policy)) is policy


def decide(policy: Any, model: Any) -> None:
    """Before FSDP1 wraps a model: a policy casts buffers as released, unless transformers keeps all of them in float32.

    Other models of this policy, such as a reference model that was wrapped before, cast theirs at their first forward
    pass, so they do the same.
    """
    if not is_made(policy):
        return
    others = _float32_buffers.others(model)
    if others:
        policy.buffer_dtype = policy.param_dtype  # writes: as released
        del _made[id(policy)]
        if _float32_buffers.known(model) or _float32_buffers.unknown(model):
            _released.stays(NAME, f"{others[0]} may have to be cast", "the precision of rotary frequencies")
