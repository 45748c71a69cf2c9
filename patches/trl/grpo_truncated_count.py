"""GRPO's default loss with `mask_truncated_completions`: divided by the tokens that it is a sum over."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant


def _counted(versions: str, mask: str, alongside: tuple[str, ...], unless: tuple[str, ...] = ()) -> Variant:
    """Of releases in which ``mask`` is what the loss is masked with, once truncated completions are out."""
    return Variant(
        Guard("trl", versions),
        (
            Rewrite(
                target="trl.trainer.grpo_trainer:GRPOTrainer._generate_and_score_completions",
                pattern="completion_mask = completion_mask * (~$TRUNCATED).unsqueeze(1).int()",
                replacement=(
                    "completion_mask = completion_mask * (~$TRUNCATED).unsqueeze(1).int(); "
                    # Where none is left the loss is 0, as it was: not 0 / 0.
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
    summary="GRPO's dapo, cispo and vespo losses are means over the tokens that they train, not the truncated ones",
    harm="wrong gradient",
    bug="with mask_truncated_completions the loss is too small, by the tokens of truncated completions",
    when="GRPOTrainer with mask_truncated_completions and loss_type dapo (the default), cispo or vespo",
    excluded_by=("mask_truncated_completions=false|absent", "loss_type=grpo|bnpo|dr_grpo|luspo|sapo"),
    symptom="""\
`GRPOTrainer` with `mask_truncated_completions=True` and `loss_type="dapo"` (the default), `"cispo"` or `"vespo"`: the
more completions of a batch are truncated, the smaller are its loss and its gradient. If of all tokens half are those of
truncated completions, which are the longest, they are half of what they should be. No error.""",
    cause="""\
These losses are sums over the tokens that are trained, divided by `num_items_in_batch`. That is counted when the
completions have been generated, before those that are truncated are masked.""",
    repair="""\
With `mask_truncated_completions`, `num_items_in_batch` is counted again, once they are masked: the tokens of all ranks
that the loss is a sum over, as in 1.9.0, which is one collective for each generation. Without it nothing changes, and
where no completion is truncated all numbers stay bit for bit what they are. Where all are, the loss stays 0. Tokens of
tools and environments were right, and stay out. With `trl-grpo-dapo-scale` both factors are right. Not repaired: the
experimental trainers that have this method of their own (DPPO, GFPO, the one with a replay buffer), and Liger's loss,
which divides by other numbers. Left as released, with one line on rank 0 that names it: a `training_step`,
`compute_loss`, `_compute_loss`, `_generate_and_score_completions` or `accelerator.backward` that is not TRL's,
transformers' or accelerate's own. Such code may have left the truncated tokens out already.""",
    changes_numbers="""\
Since TRL 0.22.0, GRPO with `mask_truncated_completions` and a dapo, cispo or vespo loss trained on gradients that were
too small by the share of tokens in truncated completions, another one for each batch, and logged loss and norm so. With
the patch batches weigh alike. A run that was tuned with it may want a lower learning rate or clipping threshold, by as
much as that share was on average.""",
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
