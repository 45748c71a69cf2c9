"""A model's cast, in verl's workers and engines."""

from __future__ import annotations

from typing import Any

import rlhf_patches

from .. import _float32_buffers

NAME = "verl-rotary-precision"
_HALF = ("torch.bfloat16", "torch.float16")


def cast(module: Any, dtype: Any) -> Any:
    """``module.to(dtype)``, but for the buffers that transformers leaves in float32.

    Args:
        module: a ``torch.nn.Module``.
        dtype: a ``torch.dtype``.

    Returns:
        The module.
    """
    lossy = _float32_buffers.is_lossy(module) if str(dtype) in _HALF else False
    if lossy is not None:
        rlhf_patches.decided(NAME, lossy)
    return _float32_buffers.keeping(NAME, module, module.to, dtype) if lossy is not False else module.to(dtype)
