"""GRPO in ms-swift's Megatron trainer: the mask of the completion's tokens lies where their log-probabilities do."""

from __future__ import annotations

from typing import Any

from rlhf_patches import Guard, Patch, Rewrite, Variant

from .. import _released

_NAME = "swift-megatron-grpo-mask"
# What makes the mask, is handed it, or says where log-probabilities stand.
_USES = (
    *("_generate_and_score_completions", "_get_encoded_batch", "_maybe_compute_logps", "_compute_kl_from_batches"),
    *("_replace_data_iterator", "forward_step", "loss_func", "model_forward", "get_logps"),
)


def as_predicted(labels: Any, trainer: Any) -> Any:
    """Each label where it is predicted, as get_batch_on_this_tp_rank has it before the model sees it."""
    # known: another of these may shift the mask itself, or stand on where it is as released.
    if other := _released.others(trainer, *_USES, packages=("swift", "rlhf_patches")):
        _released.stays(_NAME, f"{other} is not ms-swift's own", "the mask")
        return labels
    return labels.roll(-1, -1)


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
    summary="Megatron GRPO's loss is over the tokens of the completion, the first one included",
    harm="wrong gradient",
    affects_rollouts=True,
    bug="Megatron GRPO never trains a completion's first token, and shifts the rollout's log-probabilities by one",
    when="megatron rlhf with GRPO",
    excluded_by=("rlhf_type=dpo|kto|gkd|rm",),
    symptom="""\
GRPO with Megatron (`megatron rlhf --rlhf_type grpo`): the first token of each completion is not trained, nor that of
each later turn, `<think>` say, or the answer where it is one token. With `--rollout_importance_sampling_mode` the
weights compare neighbouring tokens: off-policy figures such as `rollout_correction/kl` are high from the first step on.
No error.""",
    cause="""\
Log-probabilities stand where a token is predicted, one place before the token, and the mask stands where the token is.
So each turn's first token is left out, and one place after its last is counted, where there is nothing to predict.""",
    repair="""\
The mask is shifted by one, as the labels are and as 4.0.3 does; it has as many tokens as before. Log-probabilities
that the rollout engine sent lie by the mask, and so where the trainer's own do. A trainer stays as released that has
a loss of its own, or another method of its own that is handed the mask: it may have the repair.

Not repaired: before 4.0.3 the trainer's log-probabilities are those at temperature 1 whatever `--temperature` the
rollouts were sampled with. In 3.11 the losses `dapo` and `cispo` are divided by the prompts' tokens too.""",
    changes_numbers="""\
Megatron GRPO has not trained the first token of any completion or turn since ms-swift 3.11.0, and importance weights
between rollout and trainer (`--rollout_importance_sampling_mode`) were those of neighbouring tokens. With the patch
losses and gradients are those of the completion; a threshold that was tuned for these weights is to be tuned anew.""",
    references=("https://github.com/modelscope/ms-swift/pull/8427",),
    variants=(
        _variant(">=3.11.0,<3.12.0", "_generate_and_score_completions", 1),
        _variant(">=3.12.0,<4.0.0", "_generate_and_score_completions", 2),
        _variant(">=4.0.0,<4.0.3", "_get_encoded_batch", 2),
    ),
    obsolete_when="when the oldest ms-swift in use is 4.0.3",
)
