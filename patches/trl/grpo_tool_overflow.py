"""GRPO's tool loop: a tool result that does not fit into the context is not trained on."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Rewrite, Variant

PATCH = Patch(
    name="trl-grpo-tool-overflow",
    summary="GRPO with tools does not train on a tool result that does not fit into the model's context",
    harm="wrong gradient",
    affects_rollouts=True,
    bug="the tokens of a tool result that overflows the context are trained on as the model's own",
    when="GRPOTrainer with tools, and a conversation that a tool result extends to the model's maximum length",
    excluded_by=("trl=sft|dpo|kto|reward|rloo",),
    symptom="""\
`GRPOTrainer` with `tools`: if a tool result extends a conversation to the model's maximum length (with vLLM,
`vllm_max_model_length`), the trainer counts as much of the result as `max_completion_length` leaves room for as
written by the model. The policy is trained to write such results, or not to, by the conversation's advantage. With
vLLM their tokens have a log-probability of 0, so the importance ratio makes their weight small, or with `sequence`
ratios that of the whole conversation. `completions/mean_length` counts them. No error.""",
    cause="""\
`_tool_call_loop` keeps such a conversation, and adds the tool result's tokens with 1 in `tool_mask`, which is 0 for
all other tool results.""",
    repair="""\
The patch sets `tool_mask` to 0 for these tokens too: loss, its divisor and metrics exclude them like those of any
other tool result. TRL 1.2.0 removes the tool result altogether, and trains on the same tokens. If nothing overflows,
results stay bit for bit identical. Not repaired: DPPO in `trl.experimental` of 1.0 and 1.1, which has its own loop;
and Liger's loss before 0.29.0, which excludes no tool result without `trl-grpo-liger-tools`.""",
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
