"""The buffers that transformers leaves in float32 in a half-precision model, when other code casts the whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import _released

_PACKAGES = ("transformers", "torch")  # torch.no_grad() decorates their forward
_FREQUENCIES = "inv_freq"


def keeping(patch: str, model: Any, cast: Callable[..., Any], *arguments: Any) -> Any:
    """Call ``cast(*arguments)``. Afterwards the known buffers are the tensors that they were.

    Args:
        patch: its name, for the log.
        model: a ``torch.nn.Module``.
        cast: casts all floating-point buffers of ``model``, and moves none to another device.

    Returns:
        What ``cast`` returns.
    """
    kept = known(model)
    left = unknown(model)
    result = cast(*arguments)
    for owner, name, buffer in kept:
        owner._buffers[name] = buffer  # writes: this is the repair
    if left:
        owners = ", ".join(sorted({type(owner).__name__ for owner, _ in left}))
        _released.stays(patch, f"{owners} is not transformers' own", "the precision of its rotary frequencies")
    return result


def known(model: Any) -> list[tuple[Any, str, Any]]:
    """Each module with a buffer that transformers reads in float32, the buffer's name, and the buffer.

    These are the rotary frequencies, which ``from_pretrained`` computes in float32 for each ``dtype``, and buffers that
    the model's class lists in ``_keep_in_fp32_modules_strict``, such as ``e_score_correction_bias``.
    """
    strict = _strict(model)
    return [
        (owner, name, buffer)
        for owner, name, buffer in _in_float32(model)
        if _is_transformers(owner) and (_is_frequency(owner, name) or name in strict)
    ]


def unknown(model: Any) -> list[tuple[Any, str]]:
    """Other modules with rotary frequencies in float32: remote code, or a forward that was replaced."""
    return [
        (owner, name)
        for owner, name, _ in _in_float32(model)
        if _is_frequency(owner, name) and not _is_transformers(owner)
    ]


def others(model: Any, dtype: Any) -> list[str]:
    """The names of all other floating-point buffers that a cast to ``dtype`` would change, of float64, too.

    Without those that transformers casts itself where it reads them, so that both ways give the same bits.
    """
    kept = {id(buffer) for _, _, buffer in known(model)}
    return [
        f"{type(owner).__name__}.{name}"
        for owner in model.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None and buffer.is_floating_point() and buffer.dtype != dtype and id(buffer) not in kept
        if not _is_scale(owner, name)
    ]


def is_lossy(model: Any) -> bool | None:
    """Whether a cast to half precision rounds a known buffer of ``model``; None if only others would be rounded."""
    if known(model):
        return True
    return None if unknown(model) else False


def _in_float32(model: Any) -> list[tuple[Any, str, Any]]:
    return [
        (owner, name, buffer)
        for owner in model.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None and str(buffer.dtype) == "torch.float32"
    ]


def _is_frequency(owner: Any, name: str) -> bool:
    # A persistent buffer, as of releases before 4.32, gets the type that from_pretrained is given.
    return name.endswith(_FREQUENCIES) and name in owner._non_persistent_buffers_set


def _is_scale(owner: Any, name: str) -> bool:
    # known: the forward of Gemma's class of this name multiplies by `embed_scale.to(weight.dtype)` in each release
    return name == "embed_scale" and type(owner).__name__.endswith("ScaledWordEmbedding") and _is_transformers(owner)


def _is_transformers(owner: Any) -> bool:
    module = type(owner).__module__
    return module.startswith("transformers.") and not _released.others(owner, "forward", packages=_PACKAGES)


def _strict(model: Any) -> set[str]:
    """The names that classes of transformers list for a cast that leaves them in float32."""
    return {
        name
        for owner in model.modules()
        # known: a class of transformers' own, which is not a user's subclass
        if type(owner).__module__.startswith("transformers.models.")
        for name in getattr(type(owner), "_keep_in_fp32_modules_strict", None) or ()
    }
