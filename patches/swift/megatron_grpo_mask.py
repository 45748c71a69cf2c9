"""GRPO in ms-swift's Megatron trainer: the completion mask is aligned with the log-probabilities."""

from __future__ import annotations

import sys
from typing import Any

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

from .. import _released

_NAME = "swift-megatron-grpo-mask"
# Methods that make the mask, receive it, or determine the position of log-probabilities.
_USES = (
    *("_generate_and_score_completions", "_get_encoded_batch", "_maybe_compute_logps", "_compute_kl_from_batches"),
    *("_replace_data_iterator", "forward_step", "loss_func", "model_forward", "get_logps", "_prepare_batch"),
    *("_prepare_model_inputs", "_apply_rollout_importance_sampling", "_compute_sequence_level_ratios"),
    *("_compute_off_policy_sequence_mask", "_compute_rollout_offpolicy_metrics", "_compute_is_correction_metrics"),
)
_PADDING = "pad_logps_back_to_batch"
_SWIFT = ("swift", "rlhf_patches")


def as_predicted(labels: Any, trainer: Any) -> Any:
    """Each label where it is predicted, as get_batch_on_this_tp_rank shifts it before the model sees it."""
    # known: a user's own version of these may shift the mask itself, or rely on its released position.
    if other := _other(trainer):
        _released.stays(_NAME, f"{other} is not ms-swift's own", "the mask")
        return labels
    return labels.roll(-1, -1)


def misplaced(self: Any) -> bool | None:
    """Whether a trainer is the release's own; None if not, because it may have the repair."""
    # known: the repair decides by the same methods.
    if not callable(getattr(self, "loss_func", None)) or not callable(getattr(self, "forward_step", None)):
        return None
    return None if _other(self) else True


def _other(trainer: Any) -> str:
    """The first function that handles the mask and is a user's; empty if all are the release's."""
    other = _released.others(trainer, *_USES, packages=_SWIFT)
    padding = getattr(sys.modules.get("swift.megatron.trainers.grpo_trainer"), _PADDING, None)
    return other or ("" if padding is None or _released.is_released(padding, _SWIFT) else _PADDING)


_TRAINER = "swift.megatron.trainers.grpo_trainer:MegatronGRPOTrainer"


def _variant(versions: str, function: str, matches: int) -> Variant:
    return Variant(
        Guard("ms-swift", versions),
        (
            Rewrite(
                target=f"{_TRAINER}.{function}",
                pattern="labels != -100",
                replacement="$AS_PREDICTED(labels, self) != -100",
                matches=matches,
                unless=("torch.roll(labels, shifts=-1, dims=-1)",),
                uses={"AS_PREDICTED": f"{__name__}:{as_predicted.__name__}"},
            ),
        ),
    )


PATCH = Patch(
    name=_NAME,
    summary="Megatron GRPO's loss covers the tokens of the completion, including the first one",
    harm="wrong gradient",
    affects_rollouts=True,
    bug="Megatron GRPO never trains a completion's first token, and shifts the rollout's log-probabilities by one",
    when="megatron rlhf with GRPO",
    excluded_by=("rlhf_type=dpo|kto|gkd|rm",),
    symptom="""\
GRPO with Megatron (`megatron rlhf --rlhf_type grpo`): the first token of each completion is not trained, nor that of
each later turn, for example `<think>`, or the answer if it is one token. With `--rollout_importance_sampling_mode`, the
weights compare neighboring tokens: off-policy metrics such as `rollout_correction/kl` are high from the first step on.
No error is raised.""",
    cause="""\
Log-probabilities are at the position where a token is predicted, one before the token, and the mask is at the position
of the token. So each turn's first token is left out, and the position after its last token is counted, where there is
nothing to predict.""",
    repair="""\
The patch shifts the mask by one position, as the labels are shifted and as 4.0.3 does. The mask has as many tokens as
before. Log-probabilities from the rollout engine are aligned with the mask, and so with the trainer's own. The patch
does not change a trainer with its own loss, or with another own method that receives the mask: it may have the repair.
The same holds if you have replaced `pad_logps_back_to_batch` in the trainer's module.

The patch does not repair that before 4.0.3, the trainer's log-probabilities are computed at temperature 1 for every
`--temperature` of the rollouts. In 3.11, the losses `dapo` and `cispo` are also divided by the prompts' tokens.""",
    changes_numbers="""\
Since ms-swift 3.11.0, Megatron GRPO did not train the first token of any completion or turn, and importance weights
between rollout and trainer (`--rollout_importance_sampling_mode`) compared neighboring tokens. With the patch, losses
and gradients are those of the completion. Tune thresholds for these weights again.""",
    references=("https://github.com/modelscope/ms-swift/pull/8427",),
    variants=(
        _variant(">=3.11.0,<3.12.0", "_generate_and_score_completions", 1),
        _variant(">=3.12.0,<4.0.0", "_generate_and_score_completions", 2),
        _variant(">=4.0.0,<4.0.3", "_get_encoded_batch", 2),
    ),
    obsolete_when="when the oldest ms-swift in use is 4.0.3",
    conditions=tuple(
        Condition(f"{_TRAINER}.{function}", f"{__name__}:{misplaced.__name__}")
        for function in ("_generate_and_score_completions", "_get_encoded_batch")
    ),
)
