"""Prompts and completions between Online DPO's trainer and vLLM. No framework is imported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def in_blocks(rows: Sequence[Any]) -> list[Any]:
    """Of two rows for each prompt, next to each other, the first ones and then the second ones."""
    return [*rows[0::2], *rows[1::2]]


def unpadded(encoded: Any) -> Any:
    """The token ids of each prompt ``[T]``, without those that the tokenizer has filled it up with."""
    ids = encoded["input_ids"]
    masks = encoded.get("attention_mask")
    if masks is None or bool(masks.all()):
        return ids
    return [each[mask.bool()] for each, mask in zip(ids, masks, strict=True)]


def generated_together(trainer: Any, prompts: list[Any], gather: Any) -> Any:
    """What vLLM makes of this rank's prompts, where several ranks are one engine, which needs the prompts of all.

    Args:
        trainer: Online DPO's.
        prompts: this rank's.
        gather: accelerate's `gather_object`.
    """
    size = trainer.vllm_tensor_parallel_size
    if size == 1:
        return trainer.llm.generate(prompts, trainer.generation_config, use_tqdm=False)
    rank = trainer.accelerator.process_index
    first = rank - rank % size  # engines are made of neighbours
    of_the_engine = gather([prompts])[first : first + size]
    outputs = trainer.llm.generate(
        [each for own in of_the_engine for each in own], trainer.generation_config, use_tqdm=False
    )
    before = sum(map(len, of_the_engine[: rank - first]))
    return outputs[before : before + len(prompts)]
