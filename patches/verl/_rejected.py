"""Responses without a token that counts, in verl's estimators that compare the responses of a group."""

from __future__ import annotations

from typing import Any

import numpy as np

import rlhf_patches

NAME = "verl-rejected-in-group"


def of_kept(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around an estimator, whose first parameters are rewards, response mask and the prompt of each response."""
    rewards, mask, index, *more = args
    apart = _apart(mask, index)
    rlhf_patches.decided(NAME, apart is not None)
    return wrapped(*args, **kwargs) if apart is None else wrapped(rewards, mask, apart, *more, **kwargs)


def _apart(mask: Any, index: Any) -> Any:
    """The prompts, with a name of its own for each rejected response; None if no group has both kinds."""
    # known: verl's trainers name prompts by strings in an array of objects
    if not isinstance(index, np.ndarray) or index.dtype != object or index.ndim != 1:
        return None
    rejected = (mask == 0).all(dim=-1).tolist()
    names = index.tolist()
    if len(rejected) != len(names) or not all(isinstance(name, str) for name in names):
        return None
    kept = {name for name, is_rejected in zip(names, rejected, strict=True) if not is_rejected}
    if not any(is_rejected and name in kept for name, is_rejected in zip(names, rejected, strict=True)):
        return None
    return np.array(
        [
            f"{name}, rejected: {row}" if is_rejected else name
            for row, (name, is_rejected) in enumerate(zip(names, rejected, strict=True))
        ],
        dtype=object,
    )
