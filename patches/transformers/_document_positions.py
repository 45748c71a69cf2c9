"""Positions that separate packed documents in transformers' masks."""

from __future__ import annotations

import torch


def documents(position_ids: torch.Tensor | None) -> torch.Tensor | None:
    """Each token's distance from the last token at position 0, or from the row's first token, in the same shape.

    None for None: positions that a model creates itself indicate no packing, which a compiled mask cannot check.
    Positions that rise by one from 0, packed or not, are unchanged. Any other jump is not the border of a document,
    and the masks ignore it. The function uses only tensors: it can be compiled, and waits for no device.
    """
    if position_ids is None:
        return None
    places = torch.arange(position_ids.shape[-1], device=position_ids.device).expand_as(position_ids)
    first = torch.where(position_ids == 0, places, 0).cummax(-1).values
    return places - first
