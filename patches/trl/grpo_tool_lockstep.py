"""GRPO's tool loop on several ranks: each rank gets its own completions, and all ranks leave the loop together."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import rlhf_patches
from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_NAME = "trl-grpo-tool-lockstep"

_LOOP = "trl.trainer.grpo_trainer:GRPOTrainer._tool_call_loop"
_GENERATE = "trl.generation.vllm_generation:VLLMGeneration.generate"
_RANKS = f"{__package__}._tool_ranks"
_IMAGES = "loop_images = [merged_images[i] for i in idxs_with_tool] if merged_images else None"


_met = ContextVar("met", default=False)
"""Whether the current loop has met the bug."""


def generates_together(self: Any) -> bool | None:
    """False if no ranks generate together; otherwise None: the ranks' numbers of conversations decide."""
    _met.set(False)
    accelerator, engine = getattr(self, "accelerator", None), getattr(self, "vllm_generation", None)
    if getattr(self, "use_vllm", None) is False or getattr(accelerator, "num_processes", None) == 1:
        return False
    own_engine = getattr(self, "vllm_mode", None) == "colocate" and getattr(engine, "tensor_parallel_size", None) == 1
    return False if own_engine else None


def decide(numbers: Sequence[int], rank: int, size: int) -> None:
    """Report once per loop whether ranks that generate together differ in their numbers of conversations.

    Args:
        numbers: of each rank, at one turn.
        rank: this one.
        size: how many adjacent ranks generate together.
    """
    if _met.get():
        return
    first = rank - rank % size
    differ = len({*numbers[first : first + size]}) > 1
    _met.set(differ)
    if differ or not any(numbers):  # the loop ends
        rlhf_patches.decided(_NAME, differ)


def _of_ranks(prompts: str, rank: str) -> str:
    """The slice of one rank, where ranks have different numbers of prompts."""
    return f"slice(sum(map(len, {prompts}[:{rank}])), sum(map(len, {prompts}[: {rank} + 1])))"


_CHANGES = (
    # Every rank reaches the check below, which decides for all ranks.
    Rewrite(
        _LOOP,
        "idxs_with_tool and iteration_num < self.max_tool_calling_iterations",
        "(idxs_with_tool or $TOGETHER(self)) and iteration_num < self.max_tool_calling_iterations",
        uses={"TOGETHER": f"{_RANKS}:together"},
    ),
    Rewrite(
        _LOOP,
        "not idxs_with_tool",
        "not $LEFT(self, idxs_with_tool)",
        inside="if not idxs_with_tool: break",
        uses={"LEFT": f"{_RANKS}:left"},
    ),
    Rewrite(
        _GENERATE,
        "all_prompts = gather_object(prompts)",
        "prompts_of_ranks = gather_object([prompts]); all_prompts = [ids for rows in prompts_of_ranks for ids in rows]",
    ),
    Rewrite(
        _GENERATE,
        "slice(accelerator.process_index * len(prompts), (accelerator.process_index + 1) * len(prompts))",
        _of_ranks("prompts_of_ranks", "accelerator.process_index"),
    ),
    Rewrite(
        _GENERATE,
        "slice(local_rank_in_group * orig_size, (local_rank_in_group + 1) * orig_size)",
        _of_ranks("gathered_prompts", "local_rank_in_group"),
    ),
    # A group of ranks may have no conversations while another group has some.
    Rewrite(
        _GENERATE,
        "self.llm.generate(vllm_prompts, sampling_params=sampling_params, use_tqdm=False)",
        "self.llm.generate(vllm_prompts, sampling_params=sampling_params, use_tqdm=False) if vllm_prompts else []",
    ),
)
_WITHOUT_FIELDS = Rewrite(
    _LOOP,
    _IMAGES,
    # On a rank without conversations; vLLM consumes the images.
    f"{_IMAGES}; multimodal_fields = multimodal_fields if idxs_with_tool else None",
)

PATCH = Patch(
    name=_NAME,
    summary="GRPO with tools and vLLM on several ranks: each rank gets the completions of its own conversations",
    harm="wrong data",
    affects_rollouts=True,
    bug="ranks with different numbers of tool calls get each other's completions, or wait forever",
    when="GRPOTrainer with tools or environments on several ranks, with vllm_mode=server or vllm_tensor_parallel_size",
    excluded_by=("use_vllm=false|absent", "trl=sft|dpo|kto|reward|rloo", "num_processes=1"),
    symptom="""\
The bug affects `GRPOTrainer` with `tools` (or environments) on several ranks, and `vllm_mode="server"`, or `"colocate"`
with `vllm_tensor_parallel_size` above 1. If ranks have different numbers of conversations that continue after a tool
call, some conversations receive the completion of another rank's conversation, with its log-probabilities, without an
error. Or the run raises `IndexError: list index out of range`. If one rank has no conversations left and another has
some, the ranks hang, or a gather fails.""",
    cause="""\
`VLLMGeneration.generate` gathers the prompts of all ranks, and each rank takes the completions from `rank *
len(prompts)` on, where `len(prompts)` is its own number of prompts. In the tool loop this number differs between
ranks. In addition, a rank leaves the loop when its own conversations have ended, while other ranks still gather.""",
    repair="""\
Each rank takes as many completions as it gave prompts, and skips those of lower ranks. The existing gather returns each
rank's number of prompts. Ranks that generate together leave the loop together: once per turn they check whether a
conversation of any rank continues, which is one more collective, of one number. A rank without conversations takes part
without prompts. While a rank's tools run, the other ranks wait, as before. One rank, vLLM in a separate process on each
rank, and runs without vLLM or without tools have no additional collective and stay bit for bit identical. A trainer
with its own `_generate`, `_tool_call_loop` or `_generate_single_turn` leaves the loop at the same point as without the
patch.

Not repaired: the distillation trainer's loop (1.11.0 and later), DPPO's (until 1.8.0), vLLM in the trainer's processes
before 0.29.1, and other causes that make ranks wait for one another during generation, namely ZeRO-3 and FSDP without
vLLM or with its sleep mode.""",
    changes_numbers="""\
Since TRL 1.0.0, GRPO with tools and a vLLM server mixed up conversations after a tool call on several ranks. A run that
did not hang or fail has trained on such mixed conversations, and is not comparable with a run with the patch.""",
    references=("https://github.com/huggingface/trl/pull/6673",),
    variants=(
        Variant(Guard("trl", ">=0.29.1,<1.1.0"), _CHANGES),
        Variant(Guard("trl", ">=1.1.0,<=1.16.0"), (*_CHANGES, _WITHOUT_FIELDS)),
    ),
    obsolete_when="when upstream keeps all ranks in the loop together",
    conditions=(Condition(_LOOP, f"{__name__}:{generates_together.__name__}"),),
)
