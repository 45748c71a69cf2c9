"""Positions that separate packed documents in transformers' masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import masking_utils

from .._released import is_released

# Captured when the patch is applied: compiled code compares identities, and reads no function's source.
_OWN = tuple(
    function
    for name in ("create_causal_mask", "create_sliding_window_causal_mask")
    if is_released(function := getattr(masking_utils, name, None), ("transformers",))
)


def masked(function: Callable[..., Any], keywords: dict[str, Any], position_ids: Any) -> dict[str, Any]:
    """The keywords of a mask's function, with the documents' positions if the function is transformers' own.

    Another function, such as one that a user has put in its place, gets the released keywords: whether it takes
    positions is unknown. Positions of None are those that a model creates itself, which indicate no packing.
    """
    if position_ids is None or not any(function is own for own in _OWN):
        return keywords
    return {**keywords, "position_ids": documents(position_ids)}


def documents(position_ids: torch.Tensor) -> torch.Tensor:
    """Each token's distance from the last token at position 0, or from the row's first token, in the same shape.

    Positions that rise by one from 0, packed or not, are unchanged. Any other jump is not the border of a document,
    and the masks ignore it. The function uses only tensors: it can be compiled, and waits for no device.
    """
    places = torch.arange(position_ids.shape[-1], device=position_ids.device).expand_as(position_ids)
    first = torch.where(position_ids == 0, places, 0).cummax(-1).values
    return places - first
