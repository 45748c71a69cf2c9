"""GRPO's default loss with `mask_truncated_completions`: divided by the number of tokens that it sums over."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant


def _counted(versions: str, mask: str, alongside: tuple[str, ...], unless: tuple[str, ...] = ()) -> Variant:
    """For releases in which ``mask`` masks the loss after truncated completions are removed."""
    return Variant(
        Guard("trl", versions),
        (
            Rewrite(
                target="trl.trainer.grpo_trainer:GRPOTrainer._generate_and_score_completions",
                pattern="completion_mask = completion_mask * (~$TRUNCATED).unsqueeze(1).int()",
                replacement=(
                    "completion_mask = completion_mask * (~$TRUNCATED).unsqueeze(1).int(); "
                    # If no token is left the loss is 0, as before, not 0 / 0.
                    "num_items_in_batch = $TRAINED_TOKENS(self, num_items_in_batch,"
                    f" self.accelerator.gather(({mask}).sum()).sum().clamp(min=1))"
                ),
                uses={"TRAINED_TOKENS": f"{__package__}._window:trained_tokens"},
                alongside=("num_items_in_batch", *alongside),
                unless=("num_items_in_batch = self.accelerator.gather($COUNTED.sum()).sum()", *unless),
            ),
        ),
    )


PATCH = Patch(
    name="trl-grpo-truncated-count",
    summary="GRPO's dapo, cispo and vespo losses are means over the trained tokens, without the truncated ones",
    harm="wrong gradient",
    bug="with mask_truncated_completions the loss is too small, by the truncated completions' share of all tokens",
    when="GRPOTrainer with mask_truncated_completions and loss_type dapo (the default), cispo or vespo",
    excluded_by=(
        "mask_truncated_completions=false|absent",
        "loss_type=grpo|bnpo|dr_grpo|luspo|sapo",
        "trl=sft|dpo|kto|reward|rloo",
    ),
    symptom="""\
`GRPOTrainer` with `mask_truncated_completions=True` and `loss_type="dapo"` (the default), `"cispo"` or `"vespo"`: the
more completions of a batch are truncated, the smaller are its loss and its gradient. If half of all tokens belong to
truncated completions, which are the longest, loss and gradient are half of their correct size. No error.""",
    cause="""\
These losses are sums over the trained tokens, divided by `num_items_in_batch`. The trainer counts `num_items_in_batch`
after generation, before it masks truncated completions.""",
    repair="""\
With `mask_truncated_completions`, the patch counts `num_items_in_batch` again after the masking, as 1.9.0 does. It
counts the tokens that the loss sums over, on all ranks, with one collective per generation. Without
`mask_truncated_completions` nothing changes, and if no completion is truncated all numbers stay bit for bit identical.
If all completions are truncated, the loss stays 0. Tokens of tools and environments stay excluded, as before.
`trl-grpo-dapo-scale` repairs another factor of the same loss. If both patches are applied, both factors are right.

Not repaired: the experimental trainers that have their own copy of this method (DPPO, GFPO, the one with a replay
buffer), and Liger's loss, which divides by other numbers. The patch does not change a `training_step`, `compute_loss`,
`_compute_loss`, `_prepare_inputs`, `_generate_and_score_completions`, `_generate` or `accelerator.backward` that is not
TRL's, transformers' or accelerate's own, and logs its name in one line on rank 0. Such code may exclude the truncated
tokens already. Your own training loop, `_clip_grad_norm` or a hook of a parameter's gradient may do so as well: with
these, too, the patch changes nothing.""",
    changes_numbers="""\
Since TRL 0.22.0, GRPO with `mask_truncated_completions` and a dapo, cispo or vespo loss trained on gradients that were
too small by the truncated completions' share of all tokens. The share differs from batch to batch. The logged losses
and norms were too small as well. With the patch batches have equal weight. If a run was tuned without the patch, it may
need a lower learning rate or clipping threshold, by the average of that share.""",
    references=(
        "https://github.com/huggingface/trl/issues/6369",
        "https://github.com/huggingface/trl/pull/6439",
        "https://arxiv.org/abs/2503.14476",
    ),
    variants=(
        _counted(">=0.22.0,<0.26.0", "completion_mask", (), unless=("tool_mask",)),
        _counted(
            ">=0.26.0,<0.28.0",
            "completion_mask * tool_mask if self.tools else completion_mask",
            ("tool_mask",),
            unless=("tool_mask = None",),
        ),
        _counted(
            ">=0.28.0,<1.9.0",
            "completion_mask if tool_mask is None else completion_mask * tool_mask",
            ("tool_mask = None",),
        ),
    ),
    obsolete_when="when the oldest trl in use is 1.9.0",
    conditions=(
        Condition(
            "trl.trainer.grpo_trainer:GRPOTrainer._generate_and_score_completions",
            f"{__package__}._conditions:masks_truncated",
        ),
    ),
)
