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
    parts = Parts(sizes)
    for place, (gradient, _) in enumerate(zip(gradients, sizes, strict=True)):
        parts.add(place, gradient)
    return parts.whole()


class Parts:
    """The sketch of a gradient that comes one parameter at a time. It keeps no gradient.

    Args:
        sizes: the parameters' numbers of elements.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._parts: dict[int, torch.Tensor] = {}

    def add(self, place: int, gradient: torch.Tensor | None) -> None:
        """Add a parameter's gradient."""
        if gradient is not None:
            part = _buckets(gradient.detach().reshape(-1), place).cpu()
            self._parts[place] = self._parts[place] + part if place in self._parts else part

    def clear(self) -> None:
        """Forget what was added."""
        self._parts.clear()

    def whole(self) -> torch.Tensor:
        """Return the sketch; a parameter without a gradient counts as zeros."""
        zeros = (torch.zeros(min(size, BUCKETS), dtype=torch.float64) for size in self._sizes)
        found = [self._parts.get(place, zero) for place, zero in enumerate(zeros)]
        return torch.cat(found) if found else torch.zeros(0, dtype=torch.float64)


def _buckets(values: torch.Tensor, place: int) -> torch.Tensor:
    if values.numel() <= BUCKETS:
        return values.double()
    total = torch.zeros(BUCKETS, dtype=torch.float64, device=values.device)
    for start in range(0, values.numel(), _AT_ONCE):
        piece = values[start : start + _AT_ONCE].double()
        piece = piece * signs(start, piece.numel(), place, values.device)
        missing = -piece.numel() % BUCKETS
        total += torch.nn.functional.pad(piece, (0, missing)).view(-1, BUCKETS).sum(0)
    return total


def signs(start: int, count: int, place: int, device: torch.device) -> torch.Tensor:
    """Return +1 or -1 for each element, from its index and its parameter's place; equal on every device and rank."""
    number = torch.arange(start, start + count, device=device) + place * 7919
    for _ in range(2):
        number = ((number >> 16) ^ number) * 0x45D9F3B & 0xFFFFFFFF
    return (1 - 2 * (((number >> 16) ^ number) & 1)).double()
