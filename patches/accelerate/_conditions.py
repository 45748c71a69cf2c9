"""In which calls the bugs of these patches occur, decided from attributes alone (`rlhf_patches.Condition`)."""

from __future__ import annotations

from typing import Any

from .. import _float32_buffers
from . import _buffer_policies, fsdp2_upcast


def keeps_low_precision(accelerator: Any, model: Any) -> bool | None:
    """Whether FSDP2 is about to shard a model whose trainable parameters stay in 16 bits or fewer.

    None for a model that is sharded or compiled already, which accelerate may return as it is, and with 4-bit
    parameters, which the repair leaves out.
    """
    try:
        if accelerator.mixed_precision == "no":
            return False
        named = list(model.named_parameters())
        if not fsdp2_upcast.low_precision(named):
            return False
        # known: only a sharded parameter has its mesh, and only a compiled model the one that it was made from
        sharded = any(hasattr(one, "device_mesh") for _, one in named)
        return None if sharded or hasattr(model, "_orig_mod") or fsdp2_upcast.has_4_bits(named) else True
    except AttributeError:
        return None


def rounds_frequencies(self: Any, model: Any) -> bool | None:
    """Whether FSDP1 is about to wrap a model whose rotary frequencies it casts, by a policy that accelerate has made.

    None for a policy that casts buffers and that somebody else may have made, and for frequencies in other code.
    """
    policy = self.mixed_precision_policy
    if getattr(self, "fsdp_version", 1) != 1 or policy is None or _float32_buffers.is_lossy(model) is False:
        return False
    released = _buffer_policies.as_released(policy)
    if released is None:
        return None if str(policy.buffer_dtype) in _buffer_policies.HALF else False
    return None if _float32_buffers.others(model, released.param_dtype) else _float32_buffers.is_lossy(model)
