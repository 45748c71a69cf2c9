"""Positions by which transformers' masks tell packed documents apart."""

from __future__ import annotations

import torch


def documents(position_ids: torch.Tensor | None) -> torch.Tensor | None:
    """Each token's distance from the last token at position 0, or from the row's first: of the same shape.

    None of none: positions that a model makes itself are of no packing, which a mask cannot see while it is compiled.
    For positions that rise by one from 0, packed or not, they are the same. Any other jump is not the border of a
    document, so that it is none for the masks either. Tensors only: it can be compiled, and waits for no device.
    """
    if position_ids is None:
        return None
    places = torch.arange(position_ids.shape[-1], device=position_ids.device).expand_as(position_ids)
    first = torch.where(position_ids == 0, places, 0).cummax(-1).values
    return places - first
