"""DeepSpeed's optimizers for 16 bits without ZeRO."""

from __future__ import annotations

import weakref
from typing import Any

from .. import _released

_MODULES = ("deepspeed.runtime.fp16.fused_optimizer", "deepspeed.runtime.fp16.unfused_optimizer")

_factors: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
"""By what an optimizer's last loss was multiplied."""
_norms: weakref.WeakKeyDictionary[Any, tuple[Any, Any]] = weakref.WeakKeyDictionary()
"""An optimizer's last norm, of scaled gradients and of unscaled ones."""


def is_released(optimizer: Any) -> bool:
    """Whether an optimizer is one of them, and takes its own steps."""
    # known: only the two classes defined in these modules have these names; a subclass defined elsewhere is a user's
    if type(optimizer).__module__ not in _MODULES:
        return False
    return not _released.others(optimizer, "step", "unscale_and_clip_grads", "zero_grad", packages=("deepspeed",))


def clears_its_own(optimizer: Any) -> bool:
    """Whether a released optimizer clears gradients in its step: that of `FusedAdam`, without `legacy_fusion`."""
    # known: as above
    return type(optimizer).__module__ == _MODULES[0] and not getattr(optimizer, "fused_adam_legacy", False)


def cleared(engine: Any) -> bool:
    """Whether the gradients of an engine's parameters have to be cleared after a step, as ZeRO's are."""
    return bool(engine.zero_optimization()) or is_released(engine.optimizer)


def scale(engine: Any) -> float | None:
    """By how much a step divides an engine's gradients; 1 for other optimizers, None if a user's code may multiply."""
    optimizer = engine.optimizer
    # known: as above
    if type(optimizer).__module__ not in _MODULES:
        return 1.0
    own = type(engine).__module__.partition(".")[0] != "deepspeed"  # known: a user's engine is defined elsewhere
    if own or optimizer.custom_loss_scaler or not is_released(optimizer):
        return None
    return float(getattr(optimizer, "loss_scale_config", optimizer).cur_scale)  # the first from 0.18.6 on


def scaled(engine: Any, loss: Any) -> Any:
    """A loss times what the step divides by."""
    factor = scale(engine)
    if factor in (1.0, None):
        if type(engine.optimizer).__module__ in _MODULES:  # known: as above
            _factors.pop(engine.optimizer, None)
        return loss
    _factors[engine.optimizer] = factor
    return loss.float() * factor


def norm(engine: Any) -> Any:
    """The norm of an engine's gradients, of which `FP16_UnfusedOptimizer` keeps that of the scaled ones.

    In a step that is skipped, releases before 0.19 keep the norm of the step before.
    """
    optimizer = engine.optimizer
    found = optimizer._global_grad_norm
    if type(optimizer).__module__ != _MODULES[1]:  # known: as above
        return found
    # A pipeline's other stages get gradients of the last one's loss, which has the same scale.
    factor = _factors.get(optimizer, scale(engine) if getattr(engine, "pipeline_parallelism", False) else None)
    if factor is None:
        return found
    of, unscaled = _norms.get(optimizer, (None, None))
    if of is not found:
        unscaled = found / factor
        _norms[optimizer] = found, unscaled
    return unscaled
