"""GRPO's tool loop: a tool result that does not fit into the context is not trained on."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Rewrite, Variant

PATCH = Patch(
    name="trl-grpo-tool-overflow",
    summary="GRPO with tools does not train on a tool result that does not fit into the model's context",
    harm="wrong gradient",
    affects_rollouts=True,
    bug="the tokens of a tool result that overflows the context are trained on as the model's own",
    when="GRPOTrainer with tools, and a conversation that a tool result takes to the model's maximum length",
    symptom="""\
`GRPOTrainer` with `tools`: where a tool result takes a conversation to the model's maximum length (of vLLM,
`vllm_max_model_length`), as much of it as `max_completion_length` leaves room for counts as written by the model. The
policy is trained to write such results, or not to, by the conversation's advantage; with vLLM their tokens have a
log-probability of 0, so that the importance ratio makes little of them, or with `sequence` ratios of all the
conversation. `completions/mean_length` counts them. No error.""",
    cause="""\
`_tool_call_loop` leaves such a conversation where it is, and adds the tool result's tokens with 1 in `tool_mask`, which
has 0 for all other tool results.""",
    repair="""\
They have 0 there too: loss, its divisor and metrics leave them out, as they do with any tool result. TRL 1.2.0 removes
the tool result altogether, and trains on the same tokens. Where nothing overflows it stays bit for bit what it was. Not
repaired: DPPO in `trl.experimental` of 1.0 and 1.1, which has a loop of its own; and Liger's loss before 0.29.0, which
leaves out no tool result without `trl-grpo-liger-tools`.""",
    references=("https://github.com/huggingface/trl/pull/5521",),
    variants=(
        Variant(
            Guard("trl", ">=0.26.0,<1.2.0"),
            (
                Rewrite(
                    target="trl.trainer.grpo_trainer:GRPOTrainer._tool_call_loop",
                    pattern="tool_mask[idx_with_tool] += [1] * (len(ct) - len(tool_mask[idx_with_tool]))",
                    replacement="tool_mask[idx_with_tool] += [0] * (len(ct) - len(tool_mask[idx_with_tool]))",
                    alongside=("completion_ids[idx_with_tool] = ct",),
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest trl in use is 1.2.0",
)
