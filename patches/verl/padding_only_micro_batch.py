"""verl's distillation: metrics of a micro-batch in which no token counts."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Signature, Variant

_MODULE = "verl.trainer.distillation.losses"
_LOSS = f"{_MODULE}:distillation_loss"
_OURS = f"{__package__}._distillation"


def _extremes(function: str, values: str) -> tuple[Rewrite, ...]:
    """The minimum and maximum of these values, each the second argument of a ``Metric``."""
    return tuple(
        Rewrite(
            target=f"{_MODULE}:{function}",
            pattern=f"{values}.{which}()",
            replacement=f"$EXTREME({values})",
            alongside=(f"Metric(AggregationType.{which.upper()}, {values}.{which}())",),
            uses={"EXTREME": f"{_OURS}:{name}"},
        )
        for which, name in (("min", "smallest"), ("max", "largest"))
    )


def _average(pattern: str, values: str) -> Rewrite:
    return Rewrite(
        target=f"{_MODULE}:compute_forward_kl_topk",
        pattern=pattern,
        # verl's metrics are numbers, or lists of them.
        replacement=f"({pattern} if {values}.numel() else [])",
    )


_METRICS = (
    *_extremes("compute_distillation_loss_range", "distillation_losses_response"),
    *_extremes("compute_forward_kl_topk", "student_mass"),
    *_extremes("compute_forward_kl_topk", "teacher_mass"),
    _average("student_mass.mean().item()", "student_mass"),
    _average("teacher_mass.mean().item()", "teacher_mass"),
    _average("(valid_overlap_count.float().mean() / k).item()", "valid_overlap_count"),
)

PATCH = Patch(
    name="verl-padding-only-micro-batch",
    summary="distillation does not raise if no token of a micro-batch counts",
    harm="crash",
    bug="the loss raises if every token of a micro-batch is masked",
    when="distillation.enabled, and small micro-batches",
    excluded_by=("distillation.enabled=false",),
    symptom="""\
Distillation (`distillation.enabled=True`) on verl 0.8.0 to 0.9.1 ends in the loss, before backward, with `RuntimeError:
min(): Expected reduction dim to be specified for input.numel() == 0. Specify the reduction dim with the 'dim'
argument.` Smaller micro-batches make the error likelier: in one of them `response_mask` is 0 everywhere, as in the
samples with which verl fills up a batch, and in responses that were filtered out.""",
    cause="""\
verl logs the minimum and the maximum of the loss and of the probability mass for each micro-batch, over the tokens that
count. A minimum of no tokens does not exist. Leaving the metric out would stop the run later: `Metric.aggregate_dp`
needs the same number of values from each rank.""",
    repair="""\
Such a micro-batch has a minimum of infinity and a maximum of minus infinity, so every rank has the same number of
values, and the step's own minimum and maximum are those of the tokens that count. The micro-batch adds nothing to the
averages of the probability masses and of the overlap, which otherwise would be NaN for the whole step. Its own loss and
gradient are 0; loss and gradient of the other micro-batches are bitwise identical.

0.8.0 averages the loss over the global mini-batch by numbers that the previous micro-batch left in the configuration:
the first micro-batch of a process has no such numbers, and without a token its loss would be NaN. With the patch each
micro-batch of 0.8.0 gets the numbers of its own mini-batch, as in 0.9.0, where the trainer sets all that `ppo_loss`
reads.

Not repaired: `distillation/abs_loss`, of the losses that estimate a KL divergence from one sample, is NaN in such a
step. If no token of any micro-batch counts, the logged minimum and maximum are infinite.

Reports count the losses of 0.8.0 that were averaged over other numbers. They cannot say whether a micro-batch had no
token that counts.""",
    changes_numbers="""\
verl 0.8.0 alone: the distillation loss of each process's first micro-batch was averaged over that micro-batch, and
the loss of each further mini-batch's first micro-batch with the token count of the mini-batch before. With the
patch all are averaged over their own mini-batch. Where mini-batches have similar numbers of tokens, the error is
one step at the start that is too large; training can continue from existing checkpoints. In 0.9.0 and 0.9.1 only
the metrics change.""",
    references=(
        "https://github.com/verl-project/verl/pull/7887",
        "https://github.com/verl-project/verl/issues/7200",
    ),
    variants=(
        Variant(
            Guard("verl", ">=0.8.0.dev0,<0.9.0"),
            (
                *_METRICS,
                Rewrite(
                    target=_LOSS,
                    pattern="config.loss_agg_mode",
                    replacement="$WITH_NUMBERS(config, data).loss_agg_mode",
                    inside="loss_agg_mode = config.loss_agg_mode",
                    alongside=("for k, v in config.global_batch_info.items(): $BODY",),
                    unless=('config.global_batch_info["dp_size"] = data["dp_size"]',),
                    uses={"WITH_NUMBERS": f"{_OURS}:with_numbers_of_the_mini_batch"},
                ),
            ),
        ),
        Variant(Guard("verl", ">=0.9.0,<=0.9.1"), _METRICS),
    ),
    obsolete_when="when verl logs such micro-batches; 0.9.1, the newest, does not",
    conditions=(Condition(_LOSS, f"{__package__}._conditions:averages_over_another_mini_batch"),),
    signatures=(
        Signature(
            "RuntimeError", "min(): Expected reduction dim to be specified for input.numel() == 0", specific=False
        ),
    ),
)
