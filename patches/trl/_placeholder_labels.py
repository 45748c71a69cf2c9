"""Labels of a vision-language model without the placeholders of images, videos and audio."""

from __future__ import annotations

from typing import Any

import torch

import rlhf_patches

from .. import _released

_NAME = "trl-vlm-image-labels"


def without(collator: Any, labels: torch.Tensor) -> torch.Tensor:
    """The labels, with -100 where the processor has put a placeholder."""
    found = _placeholders(collator, labels)
    is_met = found is not None and bool(found.any())
    rlhf_patches.decided(_NAME, is_met)
    return labels.masked_fill(found, -100) if found is not None and is_met else labels


def without_in_prompts(collator: Any, labels: torch.Tensor) -> torch.Tensor:
    """The same for prompts with completions, of which only the completions may count."""
    if collator.completion_only_loss:
        rlhf_patches.decided(_NAME, False)
        return labels
    return without(collator, labels)


def _placeholders(collator: Any, labels: torch.Tensor) -> torch.Tensor | None:
    processor = collator.processor
    # known: a processor of transformers, whose tokens these attributes name
    is_theirs = type(processor).__module__.startswith("transformers.models.")
    methods = ("torch_call", "_collate_language_modeling", "_collate_prompt_completion")
    if not is_theirs or _released.others(collator, *methods, packages=("trl",)):
        return None
    tokens: list[Any] = []
    for kind in ("image", "video", "audio"):
        tokens += getattr(processor, f"{kind}_token_ids", None) or [getattr(processor, f"{kind}_token_id", None)]
    # A tokenizer without a placeholder gives the token of unknown words in its place.
    unknown = getattr(getattr(processor, "tokenizer", None), "unk_token_id", None)
    known = [token for token in tokens if isinstance(token, int) and token != unknown]
    return torch.isin(labels, torch.tensor(known, dtype=labels.dtype)) if known else None
