"""Prompts and completions between Online DPO's trainer and vLLM. This module imports no framework."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import rlhf_patches


def in_blocks(rows: Sequence[Any]) -> list[Any]:
    """Reorder two adjacent rows per prompt: the first rows of all prompts, then the second rows."""
    return [*rows[0::2], *rows[1::2]]


def unpadded(encoded: Any) -> Any:
    """The token ids of each prompt ``[T]``, without the padding that the tokenizer has added."""
    ids = encoded["input_ids"]
    masks = encoded.get("attention_mask")
    if masks is None:
        return ids
    whole = bool(masks.all())
    rlhf_patches.decided("trl-online-dpo-server-padding", not whole)
    if whole:
        return ids
    return [each[mask.bool()] for each, mask in zip(ids, masks, strict=True)]


def generated_together(trainer: Any, prompts: list[Any], gather: Any) -> Any:
    """vLLM's completions of this rank's prompts, if several ranks form one engine, which needs the prompts of all.

    Args:
        trainer: Online DPO's.
        prompts: this rank's.
        gather: accelerate's `gather_object`.
    """
    size = trainer.vllm_tensor_parallel_size
    if size == 1:
        return trainer.llm.generate(prompts, trainer.generation_config, use_tqdm=False)
    rank = trainer.accelerator.process_index
    first = rank - rank % size  # an engine consists of adjacent ranks
    of_the_engine = gather([prompts])[first : first + size]
    if (differ := _differ(of_the_engine)) is not None:
        rlhf_patches.decided("trl-online-dpo-tensor-parallel", differ)
    outputs = trainer.llm.generate(
        [each for own in of_the_engine for each in own], trainer.generation_config, use_tqdm=False
    )
    before = sum(map(len, of_the_engine[: rank - first]))
    return outputs[before : before + len(prompts)]


def _differ(of_the_engine: Sequence[list[Any]]) -> bool | None:
    """Whether the ranks of an engine have different prompts; None if only the images may differ."""
    texts = [[each.get("prompt") if isinstance(each, dict) else each for each in own] for own in of_the_engine]
    if any(own != texts[0] for own in texts):
        return True
    return None if any(isinstance(each, dict) for own in of_the_engine for each in own) else False


def one_engine_per_rank(self: Any) -> bool | None:
    """False if each rank has an engine of its own; otherwise None: the prompts of the ranks decide."""
    return False if getattr(self, "vllm_tensor_parallel_size", None) == 1 else None


def asks_a_server(self: Any, prompts: Any) -> bool | None:
    """Whether a server answers some prompts; None if the trainer does not say."""
    if getattr(self, "vllm_mode", None) != "server":
        return None
    return True if isinstance(prompts, Sequence) and len(prompts) > 0 else None
