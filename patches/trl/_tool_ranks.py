"""The tool loop on several ranks that generate together: which ranks have conversations left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accelerate.utils import gather_object
from trl.generation.vllm_generation import VLLMGeneration

from .. import _released
from . import grpo_tool_lockstep

_METHODS = ("_generate", "_tool_call_loop", "_generate_single_turn")
"""The methods by which all ranks reach the loop, and generate in it."""


def together(trainer: Any) -> bool:
    """Whether all ranks generate by a collective: with a vLLM server, or one engine of several ranks.

    True only with TRL's own generation code, whose collectives are known: a user's may have none, and may need a
    prompt, which a rank without conversations does not have.
    """
    if not trainer.use_vllm or trainer.accelerator.num_processes == 1:
        return False
    if getattr(type(trainer.vllm_generation), "generate", None) is not VLLMGeneration.generate:
        return False
    if _released.others(trainer, *_METHODS) or _released.others(trainer.vllm_generation, "generate"):
        return False
    return bool(trainer.vllm_mode == "server" or trainer.vllm_generation.tensor_parallel_size > 1)


def left(trainer: Any, indices: Sequence[int]) -> bool:
    """Whether a conversation continues, on any rank if they generate ``together``, with a collective of one number."""
    if not together(trainer):
        return bool(indices)
    numbers = gather_object([len(indices)])
    ranks = len(numbers) if trainer.vllm_mode == "server" else trainer.vllm_generation.tensor_parallel_size
    grpo_tool_lockstep.decide(numbers, trainer.accelerator.process_index, ranks)
    return any(numbers)
