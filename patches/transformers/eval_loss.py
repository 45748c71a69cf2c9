"""transformers: ``eval_loss`` on several ranks is scaled like a gradient, and differs from the mean on one rank."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_TRAINER = "transformers.trainer:Trainer"
_COUNTS = f"{__package__}._batch_counts"
_KEPT_LABELS = '(self.label_smoother is not None or self.compute_loss_func is not None) and "labels" in inputs'
_DIVISION = "num_items_in_batch / $RANKS"  # was added together with the filter


def _changes(returned: str, alongside: tuple[str, ...] = (), unless: tuple[str, ...] = ()) -> tuple[Rewrite, ...]:
    """For releases that count in evaluation too.

    Args:
        returned: the function for the result of the count.
        alongside: statements of the count in these releases.
        unless: statements of the count in other releases.
    """
    return (
        Rewrite(
            target=f"{_TRAINER}.prediction_step",
            pattern="self._get_num_items_in_batch([inputs], self.args.device)",
            replacement="$COUNTED(self, [inputs], self.args.device)",
            uses={"COUNTED": f"{_COUNTS}:counted"},
        ),
        Rewrite(
            target=f"{_TRAINER}._get_num_items_in_batch",
            pattern="self.accelerator.gather(num_items_in_batch.to(device)).sum()",
            replacement="$GATHERED(self, num_items_in_batch.to(device))",
            alongside=alongside,
            unless=unless,
            uses={"GATHERED": f"{_COUNTS}:gathered"},
        ),
        Rewrite(
            target=f"{_TRAINER}._get_num_items_in_batch",
            pattern="return num_items_in_batch",
            replacement="return $RETURNED(self, num_items_in_batch)",
            uses={"RETURNED": f"{_COUNTS}:{returned}"},
        ),
        Rewrite(
            target=f"{_TRAINER}.compute_loss",
            pattern=_KEPT_LABELS,  # the check before any code has used the count
            replacement=f"(num_items_in_batch := $OF_THIS_RANK(num_items_in_batch), {_KEPT_LABELS})[1]",
            uses={"OF_THIS_RANK": f"{_COUNTS}:of_this_rank"},
        ),
        Rewrite(
            target=f"{_TRAINER}.compute_loss",
            pattern="self.args.average_tokens_across_devices",
            replacement="(self.args.average_tokens_across_devices and $IS_OF_RANKS(num_items_in_batch))",
            alongside=("loss *= $FACTOR",),
            uses={"IS_OF_RANKS": f"{_COUNTS}:is_of_ranks"},
        ),
    )


PATCH = Patch(
    name="transformers-eval-loss",
    summary="`eval_loss` on several ranks equals that of one rank",
    harm="wrong metric",
    bug="eval_loss is multiplied by the number of ranks, or weighted by tokens of other samples",
    when="evaluation on several ranks",
    excluded_by=(
        "trl=grpo|rloo",
        "num_processes=1",
    ),
    symptom="""\
`Trainer.evaluate()` and `predict()` on several ranks, and trainers that use its `compute_loss` (TRL's SFT), report a
loss that depends on the number of ranks. For T5, BERT's classifiers and other models that ignore `num_items_in_batch`,
2 ranks report twice the loss, 8 ranks 8 times. For causal language models each step's loss is weighted by tokens. The
last step, which is filled up with samples that do not count, may have a large error: three sequences with losses of
3.634, 3.432 and 3.436 have an `eval_loss` of 3.501 on one rank, and 4.372 on two. `load_best_model_at_end` and early
stopping use this loss. No error.""",
    cause="""\
Since 4.57.0 an evaluation step counts the tokens of all ranks, as a training step does, and `compute_loss` multiplies
by the number of ranks. This is right for gradients, which are averaged over ranks afterwards. Losses in evaluation are
not averaged: each rank's loss counts for its own samples, and the samples that fill up the last step are dropped,
though they were counted. A loss that is not divided by the count is multiplied as well. From 4.46.2 to 4.48.3
evaluation counts nothing and multiplies every loss. The bug occurs with `average_tokens_across_devices`, the default
since 4.54.0.""",
    repair="""\
In an evaluation step `compute_loss` uses this rank's own count and does not multiply: `eval_loss` is the mean over
samples of their batch's mean, on any number of ranks. `compute_loss_func` and label smoothing receive the rank's own
count, too. A batch without any label counts as a loss of 0, as released; from 5.23.0 on it is left out, as on one rank.
Before 4.49.0 the patch removes the multiplication in evaluation.

On one rank, in training, and with `average_tokens_across_devices=False` nothing changes; predictions and metrics stay
what they are. A trainer that overrides `compute_loss` or `prediction_step` is left as released, whether it passes the
count on or scales by itself; the patch knows and repairs TRL's `SFTTrainer`. If a trainer passes a count of its own,
nothing changes. Context and sequence parallelism are left as released.

The patch cannot see code around `evaluate()`, or a `compute_loss_func`, that divides by the number of ranks itself.
With the patch its loss is too small by that number: remove the division.

Not repaired: the last batch that counts, if it is filled up only in part. Its samples then have the mean of the whole
batch, including the samples that fill it up. Of 13 samples in batches of 2 this affects one: `eval_loss` is 3.4756
instead of one rank's 3.4727.""",
    references=(
        "https://github.com/huggingface/transformers/issues/35078",
        "https://github.com/huggingface/transformers/pull/41183",
        "https://github.com/Liquid4All/liquid-finetune/pull/38",
    ),
    variants=(
        Variant(
            Guard("transformers", ">=4.46.2,<4.49.0"),
            (
                Rewrite(
                    target=f"{_TRAINER}.compute_loss",
                    pattern="self.args.average_tokens_across_devices",
                    inside="self.args.average_tokens_across_devices and self.model_accepts_loss_kwargs",
                    replacement=(
                        "(self.args.average_tokens_across_devices"
                        " and (num_items_in_batch is not None or getattr(model, 'training', True)))"
                    ),
                    alongside=("loss *= self.accelerator.num_processes",),
                ),
            ),
        ),
        Variant(
            Guard("transformers", ">=4.57.0,<5.23.0"),
            _changes("returned", unless=(_DIVISION,)),
        ),
        Variant(
            Guard("transformers", ">=5.23.0,<=5.24.0"),
            _changes("returned_before_a_filter", alongside=(_DIVISION,)),
        ),
    ),
    obsolete_when="when the oldest transformers in use scales losses in training only; no release so far does",
    changes_numbers="""\
Since 4.57.0 (with `average_tokens_across_devices=True` from 4.46.2 to 4.48.3) `eval_loss` on several ranks has been too
large by up to the number of ranks: by that number for models that ignore `num_items_in_batch`; by less, most of it from
the last step, for causal language models. With the patch it equals that of one rank. Do not compare it with values that
were logged without the patch, and set its thresholds again (early stopping). The training is right; the checkpoint that
was kept as the best may not be the best.""",
    conditions=(Condition("transformers.trainer:Trainer.prediction_step", f"{_COUNTS}:evaluates_over_ranks"),),
)
