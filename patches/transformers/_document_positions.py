"""Positions that separate packed documents in transformers' masks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from .._released import is_released

_FUNCTIONS = ("create_causal_mask", "create_sliding_window_causal_mask")
_HOLDERS = ("masking_utils", "models.gpt_oss.modeling_gpt_oss", "models.afmoe.modeling_afmoe")
# Captured when the patch is applied, since compiled code can compare identities, but read no function's source. A model
# may hold transformers' own function where another one has replaced it in `masking_utils`.
_OWN = tuple(
    function
    for holder in _HOLDERS
    for name in _FUNCTIONS
    if is_released(function := getattr(sys.modules.get(f"transformers.{holder}"), name, None), ("transformers",))
)


def masked(keywords: dict[str, Any], position_ids: Any, *functions: Callable[..., Any]) -> dict[str, Any]:
    """The keywords of a mask, with the documents' positions if all of a model's mask functions are transformers' own.

    If one is another, such as a user's, all get the released keywords: whether it takes positions is unknown, and a
    model with one repaired mask would be neither right nor as released. Positions of None are those that a model
    creates itself, which indicate no packing.
    """
    if position_ids is None or not all(any(function is own for own in _OWN) for function in functions):
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
