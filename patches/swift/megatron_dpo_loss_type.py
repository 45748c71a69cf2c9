"""DPO in ms-swift's Megatron trainer: the loss that was asked for."""

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
        losses: each token's, ``[B, S]`` or, packed, ``[1, T]``; of this context-parallel rank.
        labels: the same shape, shifted already; -100 where there is nothing to predict.
        packed_seq_params: Megatron's, or None where each row is a sequence.
        sequence_logps: four tensors ``[pairs]``, sums over tokens: the policy's log-probabilities of the chosen
            answers and of the rejected ones, and the reference's.

    Returns:
        Losses, chosen rewards and rejected rewards, ``[pairs]`` each.
    """
    inner = trainer.dummy_dpo_trainer
    loss_type = inner.loss_type
    # known: TRL's own, which takes it by this name, or before 0.20 reads it from the trainer
    named = "loss_type" in inspect.signature(inner.dpo_loss).parameters
    wanted = sequence_logps
    if loss_type == "ipo":
        # What sums the log-probabilities counts the tokens: packed sequences and context-parallel ranks included.
        sequences = 2 * len(sequence_logps[0])
        # known: ms-swift's own, called with what it takes
        counted = "num_samples" in inspect.signature(trainer.get_logps).parameters
        ones = losses.new_full(losses.shape, -1.0).float()
        tokens = trainer.get_logps(ones, labels, packed_seq_params, **({"num_samples": sequences} if counted else {}))
        chosen, rejected = tokens.clamp(min=1).chunk(2)
        wanted = tuple(logps / count for logps, count in zip(sequence_logps, (chosen, rejected) * 2, strict=True))
    if named and loss_type != "sigmoid":
        try:
            asked_for: tuple[Any, Any, Any] = inner.dpo_loss(*wanted, loss_type=loss_type)
        except (AttributeError, TypeError, ValueError) as error:
            # Other pipeline stages are waiting for this one: as released, and not an error here.
            _out_of_reach(str(loss_type), f"{type(error).__name__}: {error}")
            wanted = sequence_logps
        else:
            rlhf_patches.decided(_NAME, True)
            return asked_for
    elif loss_type != "sigmoid":  # TRL's before 0.20: right as released, but for IPO's sums
        rlhf_patches.decided(_NAME, loss_type == "ipo")
    released: tuple[Any, Any, Any] = inner.dpo_loss(*wanted)
    return released


@functools.cache
def _out_of_reach(loss_type: str, why: str) -> None:
    logger.warning(
        "--loss_type %s: ms-swift's Megatron DPO cannot compute it (%s), and minimises the sigmoid loss, as it has "
        "always done: choose another one",
        loss_type,
        why,
    )


PATCH = Patch(
    name=_NAME,
    summary="Megatron DPO minimises the loss that `--loss_type` names",
    harm="wrong gradient",
    bug="Megatron DPO minimises the sigmoid loss whatever --loss_type names",
    when="megatron rlhf with DPO, and a --loss_type other than sigmoid",
    excluded_by=("loss_type=sigmoid", "rlhf_type=grpo|kto|gkd|rm"),
    symptom="""\
DPO with Megatron (`megatron rlhf --rlhf_type dpo`) and `--loss_type hinge`, `ipo` or any other: the run is the same as
with `sigmoid`, to the last digit, and nothing says so.""",
    cause="""\
The trainer has the argument and calls `dpo_loss` without it. That function, ms-swift's own since 4.0.3 and TRL's
before, takes the loss as an argument whose default is `sigmoid` (TRL since 0.20; an earlier one reads it from the
trainer). IPO is also an average over tokens, and the trainer passes sums.""",
    repair="""\
`dpo_loss` gets the loss type. For IPO all four log-probabilities are divided by the number of tokens that are
predicted, which is counted by the function that has summed them, over packed sequences and context-parallel ranks.

What is minimised then, with `h` the difference of the log-ratios of the chosen and the rejected answer: sigmoid,
`-log s(beta h)` (Rafailov et al. 2023, [arXiv 2305.18290](https://arxiv.org/abs/2305.18290), eq. 7); hinge,
`max(0, 1 - beta h)` (Liu et al. 2023, [arXiv 2309.06657](https://arxiv.org/abs/2309.06657)); IPO,
`(h - 1 / (2 beta))^2` (Azar et al. 2023, [arXiv 2310.12036](https://arxiv.org/abs/2310.12036), eq. 17, with `h`
averaged over tokens as ms-swift's trainer without Megatron and TRL do); and so on for the others.

`bco_pair` (a running mean of rewards), `discopop` (`--discopop_tau`) and `sft` (a loss of its own; `--rpo_alpha` adds
one) need what this trainer does not have. With them, and with a name that `dpo_loss` does not know, the run minimises
`sigmoid` as released, and a warning says so.""",
    changes_numbers="""\
Megatron DPO has minimised the sigmoid loss whatever `--loss_type` said, since ms-swift 3.7.0. A run with another loss
was a run with `sigmoid`: its checkpoint is DPO's, and a `beta` or learning rate that was tuned with it belongs to that
loss (IPO and hinge want others). To go on as before, set `--loss_type sigmoid`. Runs with `sigmoid` do not change.""",
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
