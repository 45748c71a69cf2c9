"""Sketches of gradients: one linear map for all gradients, so the sketch of a sum is the sum of the sketches.

The map is a count sketch: each element gets a sign from a hash of its index, and elements with the same index modulo
`BUCKETS` are summed. Norms are preserved in expectation. Tensors of at most `BUCKETS` elements are kept whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

BUCKETS = 64
_AT_ONCE = BUCKETS * 2**16


def sketch(gradients: Iterable[torch.Tensor | None], sizes: Sequence[int]) -> torch.Tensor:
    """Sketch a gradient, given per parameter; None counts as zeros.

    Args:
        gradients: tensors of any shape and floating dtype, on any device.
        sizes: the parameters' numbers of elements.

    Returns:
        a float64 vector on the CPU.
    """
    parts = []
    for place, (gradient, size) in enumerate(zip(gradients, sizes, strict=True)):
        if gradient is None:
            parts.append(torch.zeros(min(size, BUCKETS), dtype=torch.float64))
        else:
            parts.append(_buckets(gradient.detach().reshape(-1), place).cpu())
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def _buckets(values: torch.Tensor, place: int) -> torch.Tensor:
    if values.numel() <= BUCKETS:
        return values.double()
    total = torch.zeros(BUCKETS, dtype=torch.float64, device=values.device)
    for start in range(0, values.numel(), _AT_ONCE):
        piece = values[start : start + _AT_ONCE].double()
        piece = piece * _signs(start, piece.numel(), place, values.device)
        missing = -piece.numel() % BUCKETS
        total += torch.nn.functional.pad(piece, (0, missing)).view(-1, BUCKETS).sum(0)
    return total


def _signs(start: int, count: int, place: int, device: torch.device) -> torch.Tensor:
    """Return +1 or -1 for each element, from its index and its parameter's place; equal on every device and rank."""
    number = torch.arange(start, start + count, device=device) + place * 7919
    for _ in range(2):
        number = ((number >> 16) ^ number) * 0x45D9F3B & 0xFFFFFFFF
    return (1 - 2 * (((number >> 16) ^ number) & 1)).double()
