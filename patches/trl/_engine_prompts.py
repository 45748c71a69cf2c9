"""Prompts and completions between Online DPO's trainer and vLLM. This module imports no framework."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def in_blocks(rows: Sequence[Any]) -> list[Any]:
    """Reorder two adjacent rows per prompt: the first rows of all prompts, then the second rows."""
    return [*rows[0::2], *rows[1::2]]


def unpadded(encoded: Any) -> Any:
    """The token ids of each prompt ``[T]``, without the padding that the tokenizer has added."""
    ids = encoded["input_ids"]
    masks = encoded.get("attention_mask")
    if masks is None or bool(masks.all()):
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
    outputs = trainer.llm.generate(
        [each for own in of_the_engine for each in own], trainer.generation_config, use_tqdm=False
    )
    before = sum(map(len, of_the_engine[: rank - first]))
    return outputs[before : before + len(prompts)]
