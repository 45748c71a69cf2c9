"""Which positions of a language model's batch are padding, if padding has the token of the end."""

from __future__ import annotations

from typing import Any

import torch

import rlhf_patches

from .. import _released

_NAME = "transformers-collator-eos"


def padding(collator: Any, labels: torch.Tensor, batch: Any, examples: Any) -> torch.Tensor:
    """In place of ``labels == pad_token_id``: without the ends of texts, where the examples say what is padding."""
    tokenizer = collator.tokenizer
    found = labels == tokenizer.pad_token_id
    mask = batch.get("attention_mask")
    if (
        tokenizer.pad_token_id != tokenizer.eos_token_id
        or not isinstance(mask, torch.Tensor)
        or mask.shape != labels.shape
        # tokenizer.pad makes a mask of ones for an example without one, which may have been padded before.
        or not all("attention_mask" in each for each in examples)
        or not _released.is_released(type(collator).torch_call, ("transformers", "trl"))
    ):
        rlhf_patches.decided(_NAME, False)
        return found
    # The first token of a text is its beginning. In a row that is padded on the left, padding would predict it.
    follows = torch.nn.functional.pad(mask[:, :-1], (1, 0)) != 0
    ends = found & (mask != 0) & follows
    rlhf_patches.decided(_NAME, bool(ends.any()))
    return found & ~ends
