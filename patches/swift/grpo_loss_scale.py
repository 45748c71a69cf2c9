"""GRPO's losses over a whole accumulation window in ms-swift's trainer without Megatron, divided twice."""

from __future__ import annotations

from typing import Any

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

from .. import _released

_NAME = "swift-grpo-loss-scale"
_PACKAGES = ("swift", "trl", "transformers", "accelerate")
_COMPUTES = ("_compute_loss", "_compute_loss_single", "_compute_loss_chunked", "_compute_loss_and_metrics")


def divided_once(trainer: Any, loss: Any) -> Any:
    """A part of the window's mean, for a Trainer that will divide it by the window's number of micro-batches.

    Args:
        trainer: a GRPOTrainer.
        loss: this micro-batch's sum over tokens, divided by the tokens of the whole window.
    """
    # The divisor of transformers' Trainer.training_step, and its condition.
    if not trainer.model.training or trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None:
        return loss
    steps = getattr(trainer, "current_gradient_accumulation_steps", trainer.args.gradient_accumulation_steps)
    if steps != 1 and (other := replaced(trainer)):
        _released.left(_NAME, other)
        return loss
    return loss * steps


def replaced(trainer: Any) -> str:
    """The first user-defined part of a step, which may already have the right scale; empty if all are released code."""
    of_the_step = _released.others(trainer, "training_step", "compute_loss", *_COMPUTES, packages=_PACKAGES)
    return of_the_step or _released.others(trainer.accelerator, "backward", packages=_PACKAGES)


def _change(trainer: str) -> tuple[Rewrite, ...]:
    return (
        Rewrite(
            target=f"{trainer}:GRPOTrainer._compute_loss_and_metrics",
            pattern="loss = (per_token_loss * completion_mask).sum() / normalizer",
            alongside=("normalizer = $TOKENS / self.accelerator.num_processes",),
            unless=("self._undo_gradient_accumulation_scaling(loss)",),
            replacement="loss = $DIVIDED_ONCE(self, (per_token_loss * completion_mask).sum() / normalizer)",
            uses={"DIVIDED_ONCE": f"{__name__}:{divided_once.__name__}"},
        ),
    )


PATCH = Patch(
    name=_NAME,
    summary="DAPO's, CISPO's and FIPO's losses are divided by the accumulation steps once",
    harm="wrong gradient",
    bug="DAPO's, CISPO's and FIPO's losses are divided by the accumulation steps twice",
    when="GRPO without Megatron, --loss_type dapo, cispo or fipo, and gradient accumulation",
    excluded_by=("loss_type=grpo|bnpo|dr_grpo|sapo|real", "rlhf_type=dpo|kto|orpo|simpo|cpo|rm|ppo"),
    symptom="""\
GRPO without Megatron (`swift rlhf --rlhf_type grpo`) with `--loss_type dapo`, `cispo` or `fipo`: loss and `grad_norm`
are too small by a factor of `--gradient_accumulation_steps`, and gradient clipping hardly ever acts. The same run with
more accumulation on fewer GPUs learns less from each step. If CHORD or SDAR adds its own loss, the weight of that loss
is too large by the same factor.""",
    cause="""\
These losses are a sum over a micro-batch's tokens, divided by the tokens of all micro-batches on all ranks: the losses
of a step's micro-batches sum to the mean. transformers' Trainer divides each of them by the number of accumulation
steps again, which is right for losses that are means over a micro-batch.""",
    repair="""\
In training, the patch multiplies the loss by the Trainer's divisor, as 4.6.0 does. It does so before the losses of
CHORD and SDAR are added, which are means over a micro-batch. A step then follows the gradient of `sum_i sum_t min(r A,
clip(r, 1 - low, 1 + high) A) / sum_i |o_i|` (Yu et al. 2025, DAPO, [arXiv
2503.14476](https://arxiv.org/abs/2503.14476), eq. 8), of CISPO with `sg(min(r, high)) A log p` under the sums (MiniMax
2025, [arXiv 2506.13585](https://arxiv.org/abs/2506.13585), eq. 4).

The loss's own divisor counts the tokens of a whole generation, not those of one step. The patch does not repair this,
and neither does 4.6.0. If `--steps_per_generation` differs from `--gradient_accumulation_steps`, a step's loss differs
from the mean by the quotient of the two. If a multi-turn rollout gives a rank more samples than a micro-batch has,
ms-swift computes their loss in chunks and averages these sums, so it is still too small by the number of chunks.

The patch does not change a step with user code: a `training_step`, a `compute_loss` or one of its callees, or an
`accelerator.backward` that is not ms-swift's, TRL's, transformers' or accelerate's own. It does not matter whether a
subclass, an assignment or a decorator puts it there. Such code may have corrected the scale already. Rank 0 logs one
warning that names it.""",
    changes_numbers="""\
Since ms-swift 3.11.0, loss and gradient of `dapo`, `cispo` and `fipo` were too small by the number of accumulation
steps. With Adam alone, this has little effect. It affects gradient clipping, the weight of CHORD's and SDAR's losses,
weight decay coupled to the gradient, and optimizers that are not scale-invariant. To keep the behavior of a run whose
`max_grad_norm`, `chord_mu_*` or `sdar_loss_coef` was tuned without the patch, multiply the norm, and divide the weight
of the other loss, by the number of accumulation steps. Runs without accumulation are not affected.""",
    references=(
        "https://github.com/modelscope/ms-swift/issues/10117",
        "https://github.com/modelscope/ms-swift/pull/10116",
    ),
    variants=(
        Variant(Guard("ms-swift", ">=3.11.0,<4.0.0"), _change("swift.trainers.rlhf_trainer.grpo_trainer")),
        Variant(Guard("ms-swift", ">=4.0.0,<4.6.0"), _change("swift.rlhf_trainers.grpo_trainer")),
    ),
    obsolete_when="when the oldest ms-swift in use is 4.6.0",
    conditions=(
        Condition(
            "swift.trainers.rlhf_trainer.grpo_trainer:GRPOTrainer._compute_loss_and_metrics",
            f"{__package__}._conditions:part_of_a_window",
            "gradient x",
        ),
        Condition(
            "swift.rlhf_trainers.grpo_trainer:GRPOTrainer._compute_loss_and_metrics",
            f"{__package__}._conditions:part_of_a_window",
            "gradient x",
        ),
    ),
)
