"""Both passes of `softmax` as one Triton kernel each, where the logits are on a GPU of NVIDIA's.

torch's own operators read and write a block of float32 for every step of the formula. These read the logits once
forward, and read and write them once backward, with no memory beside some numbers per token. Triton comes with
torch's builds for CUDA. Where it cannot compile, and within a CUDA graph's capture, torch's operators compute the same.
"""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any, NamedTuple

import torch

logger = logging.getLogger("rlhf_patches")

FORWARD, BACKWARD = (2048, 4), (8192, 16)
"""Columns at once, and warps. The fastest on an H100 of 2048 to 32768 columns and 4 to 32 warps, by 1 to 30 %."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_failed = False


def serves(logits: torch.Tensor) -> bool:
    """Whether these logits, ``[..., V]``, may be given to `sum_up` and `write_gradient`, which may still refuse."""
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
    """Write each token's m = max x, sum(exp(x - m)), and sum(exp(x - m) (x - m)) if it is asked for.

    Args:
        matrix: the logits, ``[tokens, V]``, which `serves`.
        maximum, total, weighted: float32 ``[tokens]``, contiguous.

    Returns:
        Whether it did; else what is in them means nothing.
    """
    tokens, columns = matrix.shape
    arguments = (matrix, matrix.stride(0), maximum, total, total if weighted is None else weighted, columns)
    return _launch("sum_up", FORWARD, matrix, (tokens,), *arguments, with_entropy=weighted is not None)


class Terms(NamedTuple):
    """Of the gradient of each token's logits: ``exp(z) (factor + slope z)``, plus ``of_target`` at the target.

    Each is ``[tokens]`` and contiguous, ``target`` int64, -1 for none, the others float32.
    """

    maximum: torch.Tensor
    factor: torch.Tensor
    slope: torch.Tensor | None
    target: torch.Tensor | None
    of_target: torch.Tensor | None

    def of(self, part: slice) -> Terms:
        """Those of some tokens."""
        return Terms(*(None if each is None else each[part] for each in self))


def write_gradient(matrix: torch.Tensor, gradient: torch.Tensor, terms: Terms) -> bool:
    """Write the gradient.

    Args:
        matrix: the logits, ``[tokens, V]``, which `serves`; ``gradient`` is of their shape and may be the same memory.
        terms: of these tokens.

    Returns:
        Whether it did; else ``gradient`` is as it was.
    """
    if gradient.stride(-1) != 1:
        return False
    tokens, columns = matrix.shape
    pointers = [terms.maximum if each is None else each for each in terms]  # what is None is not read
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
    except Exception as error:  # no Triton, no compiler, no place for its files; nothing has been launched
        _failed = True
        logger.info("log-probabilities: no Triton kernel here, torch's operators compute them: %r", error)
        return False
    return True


def _kernels() -> ModuleType:
    from . import kernels

    return kernels
