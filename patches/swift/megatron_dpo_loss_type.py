"""DPO in ms-swift's Megatron trainer computes the configured loss."""

from __future__ import annotations

import functools
import inspect
import logging
from typing import Any

import rlhf_patches
from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_NAME = "swift-megatron-dpo-loss-type"

logger = logging.getLogger("rlhf_patches")


def loss_as_asked_for(
    trainer: Any, losses: Any, labels: Any, packed_seq_params: Any, *sequence_logps: Any
) -> tuple[Any, Any, Any]:
    """``dpo_loss`` with the ``loss_type`` of the arguments.

    Args:
        trainer: a MegatronDPOTrainer.
        losses: per token, ``[B, S]`` or, packed, ``[1, T]``; of this context-parallel rank.
        labels: the same shape, already shifted; -100 where there is nothing to predict.
        packed_seq_params: Megatron's, or None if each row is a sequence.
        sequence_logps: four tensors ``[pairs]``, sums over tokens: the policy's log-probabilities of the chosen and of
            the rejected answers, and the reference model's.

    Returns:
        Losses, chosen rewards and rejected rewards, ``[pairs]`` each.
    """
    inner = trainer.dummy_dpo_trainer
    loss_type = inner.loss_type
    # known: TRL's own, with an argument of this name, or before 0.20 an attribute of the trainer
    named = "loss_type" in inspect.signature(inner.dpo_loss).parameters
    wanted = sequence_logps
    if loss_type == "ipo":
        # The function that sums log-probabilities also counts tokens, with packed sequences and context parallelism.
        sequences = 2 * len(sequence_logps[0])
        # known: ms-swift's own, called with its arguments
        counted = "num_samples" in inspect.signature(trainer.get_logps).parameters
        ones = losses.new_full(losses.shape, -1.0).float()
        tokens = trainer.get_logps(ones, labels, packed_seq_params, **({"num_samples": sequences} if counted else {}))
        chosen, rejected = tokens.clamp(min=1).chunk(2)
        wanted = tuple(logps / count for logps, count in zip(sequence_logps, (chosen, rejected) * 2, strict=True))
    if named and loss_type != "sigmoid":
        try:
            asked_for: tuple[Any, Any, Any] = inner.dpo_loss(*wanted, loss_type=loss_type)
        except (AttributeError, TypeError, ValueError) as error:
            # Other pipeline stages wait for this one: use the released loss instead of raising here.
            _out_of_reach(str(loss_type), f"{type(error).__name__}: {error}")
            wanted = sequence_logps
        else:
            rlhf_patches.decided(_NAME, True)
            return asked_for
    elif loss_type != "sigmoid":  # TRL's before 0.20: right as released, except for IPO's sums
        rlhf_patches.decided(_NAME, loss_type == "ipo")
    released: tuple[Any, Any, Any] = inner.dpo_loss(*wanted)
    return released


@functools.cache
def _out_of_reach(loss_type: str, why: str) -> None:
    logger.warning(
        "--loss_type %s: ms-swift's Megatron DPO cannot compute it (%s), and minimizes the sigmoid loss, as "
        "released: choose another one",
        loss_type,
        why,
    )


PATCH = Patch(
    name=_NAME,
    summary="Megatron DPO minimizes the loss that `--loss_type` names",
    harm="wrong gradient",
    bug="Megatron DPO minimizes the sigmoid loss whatever --loss_type names",
    when="megatron rlhf with DPO, and a --loss_type other than sigmoid",
    excluded_by=("loss_type=sigmoid", "rlhf_type=grpo|kto|gkd|rm"),
    symptom="""\
DPO with Megatron (`megatron rlhf --rlhf_type dpo`) and `--loss_type hinge`, `ipo` or any other loss: the run is
identical to one with `sigmoid`, to the last digit. Nothing is logged.""",
    cause="""\
The trainer has the argument and does not pass it to `dpo_loss`. That function, ms-swift's own since 4.0.3 and TRL's
before, has the loss as an argument whose default is `sigmoid` (TRL since 0.20; earlier releases read it from the
trainer). IPO is also an average over tokens, and the trainer passes sums.""",
    repair="""\
`dpo_loss` gets the loss type. For IPO, all four log-probabilities are divided by the number of predicted tokens. The
function that sums them also counts these tokens, over packed sequences and context-parallel ranks.

The minimized loss is then, with `h` the difference of the log-ratios of the chosen and the rejected answer: sigmoid,
`-log s(beta h)` (Rafailov et al. 2023, [arXiv 2305.18290](https://arxiv.org/abs/2305.18290), eq. 7); hinge, `max(0, 1 -
beta h)` (Liu et al. 2023, [arXiv 2309.06657](https://arxiv.org/abs/2309.06657)); IPO, `(h - 1 / (2 beta))^2` (Azar et
al. 2023, [arXiv 2310.12036](https://arxiv.org/abs/2310.12036), eq. 17, with `h` averaged over tokens as in ms-swift's
trainer without Megatron and in TRL); and so on for the others.

`bco_pair` (a running mean of rewards), `discopop` (`--discopop_tau`) and `sft` (a separate loss; `--rpo_alpha` adds
one) need data that this trainer does not have. With them, and with a name that `dpo_loss` does not support, the run
minimizes `sigmoid` as released, and a warning is logged.""",
    changes_numbers="""\
Since ms-swift 3.7.0, Megatron DPO minimized the sigmoid loss for every `--loss_type`. A run with another loss was a run
with `sigmoid`: its checkpoint is DPO's, and a `beta` or learning rate that was tuned in it fits that loss (IPO and
hinge need others). To keep the loss of such a run, set `--loss_type sigmoid`. Runs with `sigmoid` are not affected.""",
    references=("https://github.com/modelscope/ms-swift/pull/10167",),
    variants=(
        Variant(
            Guard("ms-swift", ">=3.7.0,<=4.6.0"),
            (
                Rewrite(
                    target="swift.megatron.trainers.dpo_trainer:MegatronDPOTrainer.loss_func",
                    pattern="self.dummy_dpo_trainer.dpo_loss($CHOSEN, $REJECTED, $REF_CHOSEN, $REF_REJECTED)",
                    alongside=("logps = self.get_logps(output_tensor, $$$WHERE)",),
                    replacement=(
                        "$LOSS(self, output_tensor, labels, packed_seq_params,"
                        " $CHOSEN, $REJECTED, $REF_CHOSEN, $REF_REJECTED)"
                    ),
                    uses={"LOSS": f"{__name__}:{loss_as_asked_for.__name__}"},
                ),
            ),
        ),
    ),
    obsolete_when="when ms-swift passes the loss type (PR #10167); 4.6.0, the newest, does not",
    conditions=(
        Condition(
            "swift.megatron.trainers.dpo_trainer:MegatronDPOTrainer.loss_func",
            f"{__package__}._conditions:another_loss",
        ),
    ),
)
