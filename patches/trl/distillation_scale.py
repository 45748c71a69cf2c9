"""GKD's and GOLD's losses: of one size however many micro-batches and ranks an optimizer step has."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_OURS = f"{__package__}._window"
_GKD = "trl.experimental.gkd.gkd_trainer:GKDTrainer.compute_loss"
_GOLD = "trl.experimental.gold.gold_trainer:GOLDTrainer.compute_loss"
_IS_DIVIDED = "self.generalized_jsd_loss($$$ARGUMENTS, num_items_in_batch=num_items_in_batch)"
# Of a release that counts or scales by itself, as DistillationTrainer does since 1.9.0.
_REPAIRED = ("self.accelerator.num_processes", "self._buffered_num_items")


def _summed(target: str, *counted: str) -> Rewrite:
    """A sum over tokens, divided by their number; ``counted`` says how often that has each of them."""
    arguments = ", ".join(("self", "self.generalized_jsd_loss", "num_items_in_batch", *counted))
    return Rewrite(
        target=target,
        pattern="self.generalized_jsd_loss",
        inside=_IS_DIVIDED,
        replacement=f"$SUMMED({arguments})",
        unless=_REPAIRED,
        uses={"SUMMED": f"{_OURS}:summed"},
    )


def _averaged(function: str, *unless: str) -> Rewrite:
    """A mean over a micro-batch."""
    return Rewrite(
        target=_GOLD,
        pattern=function,
        inside=f"{function}($$$ARGUMENTS)",
        replacement=f"$AVERAGED(self, {function}, num_items_in_batch)",
        unless=(*_REPAIRED, *unless),
        uses={"AVERAGED": f"{_OURS}:averaged"},
    )


_ULD = _averaged("self.uld_loss_fn")

PATCH = Patch(
    name="trl-distillation-scale",
    summary="GKD's and GOLD's losses have one size however many micro-batches and ranks an optimizer step has",
    harm="wrong gradient",
    bug="the gradient is divided by the ranks, and GOLD's divided or multiplied by the accumulation steps",
    when="GKDTrainer on several ranks; GOLDTrainer on several ranks, or with gradient accumulation",
    symptom="""\
Since TRL 1.7.0 `GKDTrainer` on several ranks trains on a gradient divided by their number, and `GOLDTrainer` besides by
`gradient_accumulation_steps`: with 8 steps on 8 GPUs a 64th. With `use_uld_loss`, and in 0.25.0 to 1.6.0 always, GOLD's
is **multiplied** by the accumulation steps. No error: the logged loss is wrong by the same factor; Adam and clipping
hide the gradient's.""",
    cause="""\
transformers counts the tokens of all micro-batches of an optimizer step, on all ranks, and gives the trainer that
number. 1.7.0 divides the divergence by it, but leaves out what follows: gradients of ranks are averaged, not added, so
`Trainer.compute_loss`, which these trainers override, multiplies by their number. And GOLD's data loader gives each
batch of a whole step once for every micro-batch, so that the number has each token as often. ULD's loss, and before
1.7.0 the divergence, are means over a micro-batch, which nothing divides by the number of micro-batches: `Trainer`
believes that what is given the number of tokens divides by it.""",
    repair="""\
In training the divergence is multiplied by the ranks, where `average_tokens_across_devices` (the default) has counted
the tokens of all, and GOLD's by `gradient_accumulation_steps`. The gradient is then that of the mean over all tokens of
the step, as of one large batch on one rank. GOLD's means are divided by the micro-batches of the step, as `Trainer`
does with any other: for ULD's loss, which is a mean over samples, as of one large batch; for the divergence before
1.7.0 as far as micro-batches have as many tokens. Nothing is gathered. GKD on one rank, GOLD on one rank without
accumulation, evaluation, Liger's losses, and images (of which nothing is counted) stay bit for bit what they are.

Not repaired: **tokens that the student has generated** (`lmbda` above 0) are divided by the number of those that the
data set has in their place, because that is what is counted; their gradients get the same factors. Liger's losses until
1.13.0 have the same fault. So has `DistillationTrainer` in 1.7.0 to 1.8.0, which 1.9.0 repairs. GKD before 1.7.0 is for
`transformers-accumulation-scale`, which leaves GOLD alone, and says so. Left as released, with one line on
rank 0 that names it: a loss, `compute_loss`, `training_step`, `get_batch_samples`, `_get_num_items_in_batch` or
`accelerator.backward` that is not TRL's, transformers' or accelerate's own, in a subclass, by assignment or within a
decorator. Such code may have corrected the size already. So is GOLD with a `get_train_dataloader` or
`_get_train_sampler` of one's own, which may give each token once.""",
    changes_numbers="""\
With A `gradient_accumulation_steps` and N ranks, GKD trained on gradients 1 / N times their size since TRL 1.7.0, GOLD
on 1 / (A N), and on A times with `use_uld_loss` or before 1.7.0. With the patch they have their size, and so has the
loss in the log. A run that was tuned with it should have its clipping threshold multiplied by what the gradient is now
larger, and with SGD its learning rate divided by that; Adam sees the factor in clipping and in its epsilon only. Take a
correction of your own out that is elsewhere, as in a callback or an optimizer.""",
    references=(
        "https://github.com/huggingface/trl/issues/4719",
        "https://github.com/huggingface/trl/pull/6006",
    ),
    variants=(
        Variant(
            Guard("trl", ">=0.25.0,<1.7.0"),
            (_averaged("self.generalized_jsd_loss", _IS_DIVIDED), _ULD),
        ),
        Variant(
            Guard("trl", ">=1.7.0,<=1.16.0"),
            (_summed(_GKD), _summed(_GOLD, "self.args.gradient_accumulation_steps"), _ULD),
            independent=True,
        ),
    ),
    obsolete_when="when the oldest trl in use scales both losses by itself; none released so far does",
    conditions=(
        Condition(
            "trl.experimental.gkd.gkd_trainer:GKDTrainer.compute_loss",
            f"{__package__}._conditions:part_of_all_ranks",
            "gradient x",
        ),
    ),
)
