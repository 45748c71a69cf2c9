"""RLOO and GRPO with dropout: the ratio of a policy to itself is 1."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_OURS = f"{__package__}._unchanged_policy"
_RLOO = "trl.trainer.rloo_trainer:RLOOTrainer"
_GRPO = "trl.trainer.grpo_trainer:GRPOTrainer"
_OLD = 'inputs.get("old_per_token_logps")'

PATCH = Patch(
    name="trl-dropout-ratio",
    summary="RLOO and GRPO with dropout: before an update, the ratio of the policy to itself is 1",
    harm="wrong gradient",
    bug="old log-probabilities come from another dropout mask, so that sequences are clipped before any update",
    when=(
        "dropout of the model or of LoRA in RLOOTrainer; also in GRPOTrainer with steps_per_generation above"
        " gradient_accumulation_steps or num_iterations above 1, if vllm_importance_sampling_correction is not in use"
    ),
    excluded_by=("trl=sft|dpo|kto|reward|gold",),
    symptom="""\
`RLOOTrainer` with dropout, for example LoRA's (`lora_dropout` is 0.05 by default in TRL's command line):
`clip_ratio/region_mean` is above 0 at the first step, before any update. A clipped sequence has no gradient, and the
other ones have random weights. The longer the completions are, the more sequences are clipped. With 48 tokens and LoRA,
gradients of a tiny model are 40 % off. No error.

`GRPOTrainer` has the same bug if it computes old log-probabilities: with `steps_per_generation` above
`gradient_accumulation_steps`, and with `num_iterations` above 1. Its ratio is that of one token, so the error is small.
With vLLM it occurs only if `vllm_importance_sampling_correction`, on by default since 0.23.0, is off.""",
    cause="""\
After a generation the trainer computes the old log-probabilities with the model in training mode. The loss computes the
new ones with another dropout mask. RLOO's ratio is that of a whole sequence, where the differences of all tokens add
up.""",
    repair="""\
Up to the first optimizer step after a generation, the policy is the one that has generated. For these micro-batches the
patch takes the loss's own log-probabilities, without their gradient, as the old ones, as `GRPOTrainer` does if
`gradient_accumulation_steps` is a multiple of `steps_per_generation * num_iterations`. The ratio is then 1, and the
gradient that of REINFORCE, under the loss's own dropout mask. Without dropout, in evaluation and outside `train()`, all
numbers stay bit for bit identical.

Later optimizer steps of the same generation stay as released: their ratio is that of two policies, and of two dropout
masks. For these, train without dropout. Also not repaired: the KL divergence in RLOO's reward, which is that of a
policy with dropout; GRPO with `use_liger_kernel`; GRPO before 0.22.0; trainers with their own copies of these methods;
and dropout in a module that has neither torch's dropout layers nor a rate as an attribute with "drop" in its name. The
patch does not see a callback that changes weights or old log-probabilities between a generation and the next optimizer
step.

GRPO with vLLM and `vllm_importance_sampling_correction` stays as released. Its loss also multiplies by the ratio of the
old log-probabilities to the engine's. The old ones cancel in the product of both ratios, unless one of them is clipped
or is that of a sequence. In these cases the two masks still have an effect, which reports do not count.

The patch does nothing if a `training_step`, `compute_loss`, `_compute_loss`, `_get_per_token_logps_and_entropies`,
`_prepare_inputs`, `_generate_and_score_completions` or `accelerator.backward` is not the trainer's, transformers' or
accelerate's own, and logs its name in one line on rank 0. The same applies to your own training loop, a
`_clip_grad_norm`, a hook of a parameter's gradient, and LOMO, which updates weights in each backward.""",
    changes_numbers="""\
Since TRL 0.22.0, RLOO with dropout trained on a part of its sequences only, with random weights. With the patch no
sequence is clipped before an update, so gradients are larger or smaller than before, and `clip_ratio` is 0 with the
default settings. Reset a learning rate, `epsilon` or clipping threshold that was tuned without the patch.""",
    references=(
        "https://github.com/huggingface/trl/blob/v1.16.0/trl/trainer/rloo_trainer.py",
        "https://arxiv.org/abs/2402.14740",
    ),
    variants=(
        Variant(
            Guard("trl", ">=0.22.0,<=1.16.0"),
            (
                Rewrite(
                    f"{_RLOO}._generate_and_score_completions",
                    "old_logps = (old_per_token_logps * completion_mask).sum(1)",
                    "old_logps = $NOTED(self, (old_per_token_logps * completion_mask).sum(1))",
                    uses={"NOTED": f"{_OURS}:generated"},
                ),
                Rewrite(
                    f"{_RLOO}._compute_loss",
                    'old_logps = inputs["old_logps"]',
                    'old_logps = $OLD(self, inputs["old_logps"], logps)',
                    alongside=("log_ratio = logps - old_logps",),
                    uses={"OLD": f"{_OURS}:old_of"},
                ),
                Rewrite(
                    f"{_GRPO}._generate_and_score_completions",
                    'output["old_per_token_logps"] = old_per_token_logps',
                    'output["old_per_token_logps"] = $NOTED(self, old_per_token_logps)',
                    uses={"NOTED": f"{_OURS}:generated"},
                ),
                Rewrite(
                    f"{_GRPO}._compute_loss",
                    f"old_per_token_logps = {_OLD}",
                    f"old_per_token_logps = $OLD(self, {_OLD}, per_token_logps)",
                    alongside=("log_ratio = per_token_logps - old_per_token_logps",),
                    uses={"OLD": f"{_OURS}:old_of"},
                ),
            ),
            independent=True,
        ),
    ),
    obsolete_when="when a policy's ratio to itself is 1 in the oldest trl in use; in 1.16.0, the newest, it is not",
    conditions=(Condition(f"{_RLOO}._compute_loss"), Condition(f"{_GRPO}._compute_loss")),
)
