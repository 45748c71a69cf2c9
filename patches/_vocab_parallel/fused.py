"""The two passes of `softmax` as one Triton kernel each, where the logits are on an NVIDIA GPU.

torch's own operators read and write a block of float32 for every step of the formula. These kernels read the logits
once in forward, and read and write them once in backward, and need only a few numbers per token of memory. torch's CUDA
builds include Triton. Where Triton cannot compile, and during CUDA graph capture, torch's operators compute the same.
"""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any, NamedTuple

import torch

logger = logging.getLogger("rlhf_patches")

FORWARD, BACKWARD = (2048, 4), (8192, 16)
"""Columns per block, and warps: fastest on an H100 among 2048 to 32768 columns and 4 to 32 warps, by 1 to 30 %."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_failed = False


def serves(logits: torch.Tensor) -> bool:
    """Whether `sum_up` and `write_gradient` may take these logits, ``[..., V]``; they may still refuse."""
    return (
        type(logits) is torch.Tensor  # a FakeTensor has no memory
        and logits.is_cuda
        and torch.version.cuda is not None
        and not _failed
        and logits.dtype in _DTYPES
        and logits.stride(-1) == 1
        and logits.numel() > 0
        and torch.cuda.get_device_capability(logits.device) >= (8, 0)
        and not torch.cuda.is_current_stream_capturing()
    )


def sum_up(matrix: torch.Tensor, maximum: torch.Tensor, total: torch.Tensor, weighted: torch.Tensor | None) -> bool:
    """Write each token's m = max x, sum(exp(x - m)), and sum(exp(x - m) (x - m)) if ``weighted`` is not None.

    Args:
        matrix: the logits, ``[tokens, V]``, for which `serves` is true.
        maximum, total, weighted: float32 ``[tokens]``, contiguous.

    Returns:
        Whether the kernel ran; if not, the outputs are undefined.
    """
    tokens, columns = matrix.shape
    arguments = (matrix, matrix.stride(0), maximum, total, total if weighted is None else weighted, columns)
    return _launch("sum_up", FORWARD, matrix, (tokens,), *arguments, with_entropy=weighted is not None)


class Terms(NamedTuple):
    """Terms of the gradient of each token's logits: ``exp(z) (factor + slope z)``, plus ``of_target`` at the target.

    Each is ``[tokens]`` and contiguous, ``target`` int64, -1 for none, the others float32.
    """

    maximum: torch.Tensor
    factor: torch.Tensor
    slope: torch.Tensor | None
    target: torch.Tensor | None
    of_target: torch.Tensor | None

    def of(self, part: slice) -> Terms:
        """The terms of some tokens."""
        return Terms(*(None if each is None else each[part] for each in self))


def write_gradient(matrix: torch.Tensor, gradient: torch.Tensor, terms: Terms) -> bool:
    """Write the gradient.

    Args:
        matrix: the logits, ``[tokens, V]``, for which `serves` is true. ``gradient`` has their shape, maybe memory.
        terms: the terms of these tokens.

    Returns:
        Whether the kernel ran; if not, ``gradient`` is not modified.
    """
    if gradient.stride(-1) != 1:
        return False
    tokens, columns = matrix.shape
    pointers = [terms.maximum if each is None else each for each in terms]  # the kernel does not read a None
    arguments = (matrix, matrix.stride(0), gradient, gradient.stride(0), *pointers, columns)
    flags = {"with_slope": terms.slope is not None, "with_target": terms.of_target is not None}
    return _launch("write_gradient", BACKWARD, matrix, (tokens, -(-columns // BACKWARD[0])), *arguments, **flags)


def _launch(
    name: str, size: tuple[int, int], matrix: torch.Tensor, grid: tuple[int, ...], *arguments: Any, **flags: bool
) -> bool:
    global _failed
    try:
        with torch.cuda.device(matrix.device):
            getattr(_kernels(), name)[grid](*arguments, **flags, block=size[0], num_warps=size[1])
    except Exception as error:  # no Triton, no compiler, or no folder for its files; no kernel was launched
        _failed = True
        logger.info("no Triton kernel available; torch's operators compute log-probabilities: %r", error)
        return False
    return True


def _kernels() -> ModuleType:
    from . import kernels

    return kernels
