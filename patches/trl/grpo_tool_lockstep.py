"""GRPO's tool loop on several ranks: each gets its own completions, and none leaves while another still generates."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Rewrite, Variant

_LOOP = "trl.trainer.grpo_trainer:GRPOTrainer._tool_call_loop"
_GENERATE = "trl.generation.vllm_generation:VLLMGeneration.generate"
_RANKS = f"{__package__}._tool_ranks"
_IMAGES = "loop_images = [merged_images[i] for i in idxs_with_tool] if merged_images else None"


def _of_ranks(prompts: str, rank: str) -> str:
    """The slice of a rank, where each has as many as it has."""
    return f"slice(sum(map(len, {prompts}[:{rank}])), sum(map(len, {prompts}[: {rank} + 1])))"


_CHANGES = (
    # Every rank comes to the one question below, which decides for all of them.
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
    # A group of ranks without conversations, beside one that has some.
    Rewrite(
        _GENERATE,
        "self.llm.generate(vllm_prompts, sampling_params=sampling_params, use_tqdm=False)",
        "self.llm.generate(vllm_prompts, sampling_params=sampling_params, use_tqdm=False) if vllm_prompts else []",
    ),
)
_WITHOUT_FIELDS = Rewrite(
    _LOOP,
    _IMAGES,
    # Of a rank without conversations; vLLM takes the images.
    f"{_IMAGES}; multimodal_fields = multimodal_fields if idxs_with_tool else None",
)

PATCH = Patch(
    name="trl-grpo-tool-lockstep",
    summary="GRPO with tools and vLLM on several ranks: each goes on with its own conversations, and none alone",
    harm="wrong data",
    affects_rollouts=True,
    bug="ranks that make unlike numbers of tool calls get each other's completions, or wait for ever",
    when="GRPOTrainer with tools or environments on several ranks, with vllm_mode=server or vllm_tensor_parallel_size",
    excluded_by=("use_vllm=false|absent",),
    symptom="""\
`GRPOTrainer` with `tools` (or environments) on several ranks, and `vllm_mode="server"`, or `"colocate"` with
`vllm_tensor_parallel_size` above 1. Where ranks have unlike numbers of conversations that go on after a tool call, some
get what was generated for a conversation of another rank, with its log-probabilities: no error. Or the run ends with
`IndexError: list index out of range`. Where one rank has none left and another has, they hang, or gathering fails.""",
    cause="""\
`VLLMGeneration.generate` gathers the prompts of all ranks, and each rank takes of the completions those from
`rank * len(prompts)` on, by its own number of prompts. In the tool loop that number is another one on each rank. And a
rank leaves the loop when its own conversations have ended, while others still gather.""",
    repair="""\
Each rank takes as many completions as it gave prompts, after those of the ranks before it, by the numbers that come
with the prompts anyway. And ranks that generate together leave the loop together: once for each turn they ask whether a
conversation of any rank goes on, which is one more collective, of one number, and a rank that has none takes part
without prompts. What a rank's tools take, the others wait for, as they did. One rank, vLLM in a process of its own on
each rank, and runs without vLLM or without tools have no collective more and the very numbers. A trainer with a
`_generate`, `_tool_call_loop` or `_generate_single_turn` of your own leaves the loop as released. Not repaired: the
distillation trainer's loop (1.11.0 and later), DPPO's (until 1.8.0), vLLM in the trainer's processes before 0.29.1, and
what else makes ranks wait for one another while they generate, ZeRO-3 and FSDP without vLLM or with its sleep mode.""",
    changes_numbers="""\
Since TRL 1.0.0, GRPO with tools and a vLLM server trained on several ranks mixed up conversations after a tool call. A
run that did not hang or fail has learned from such texts, and is not to be compared with one that has the patch.""",
    references=("https://github.com/huggingface/trl/pull/6673",),
    variants=(
        Variant(Guard("trl", ">=0.29.1,<1.1.0"), _CHANGES),
        Variant(Guard("trl", ">=1.1.0,<=1.16.0"), (*_CHANGES, _WITHOUT_FIELDS)),
    ),
    obsolete_when="when upstream has made the loop one of all ranks",
)
