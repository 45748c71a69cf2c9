"""GKD's and GOLD's losses: their size does not depend on the number of micro-batches and ranks."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_OURS = f"{__package__}._window"
_GKD = "trl.experimental.gkd.gkd_trainer:GKDTrainer.compute_loss"
_GOLD = "trl.experimental.gold.gold_trainer:GOLDTrainer.compute_loss"
_IS_DIVIDED = "self.generalized_jsd_loss($$$ARGUMENTS, num_items_in_batch=num_items_in_batch)"
# In a release that counts or scales by itself, as DistillationTrainer does since 1.9.0.
_REPAIRED = ("self.accelerator.num_processes", "self._buffered_num_items")


def _summed(target: str, *counted: str) -> Rewrite:
    """A sum over tokens, divided by their number; ``counted`` is how often that number counts each token."""
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
    summary="GKD's and GOLD's losses do not depend on the number of micro-batches and ranks of an optimizer step",
    harm="wrong gradient",
    bug="the gradient is divided by the number of ranks, and GOLD's divided or multiplied by the accumulation steps",
    when="GKDTrainer on several ranks; GOLDTrainer on several ranks, or with gradient accumulation",
    excluded_by=("trl=sft|dpo|grpo|kto|reward|rloo",),
    symptom="""\
Since TRL 1.7.0 `GKDTrainer` on several ranks trains on a gradient divided by the number of ranks. `GOLDTrainer`
divides it by `gradient_accumulation_steps` as well: with 8 steps on 8 GPUs the gradient is 1/64 of its size. With
`use_uld_loss`, and in 0.25.0 to 1.6.0 always, GOLD **multiplies** the gradient by the accumulation steps. No error:
the logged loss is wrong by the same factor; Adam and clipping hide the gradient's.""",
    cause="""\
transformers counts the tokens of all micro-batches of an optimizer step, on all ranks, and passes that number to the
trainer. 1.7.0 divides the divergence by it, but omits a correction: ranks average their gradients instead of adding
them, so `Trainer.compute_loss`, which these trainers override, multiplies by the number of ranks. GOLD's data loader
also yields each batch of a whole step once per micro-batch, so the number counts each token that often. ULD's loss,
and before 1.7.0 the divergence, are means over a micro-batch, and nothing divides them by the number of micro-batches:
`Trainer` assumes that a loss which receives the number of tokens divides by it.""",
    repair="""\
In training the patch multiplies the divergence by the number of ranks if `average_tokens_across_devices` (the default)
has counted the tokens of all ranks, and GOLD's by `gradient_accumulation_steps`. The gradient is then that of the mean
over all tokens of the step, as for one large batch on one rank. The patch divides GOLD's means by the micro-batches of
the step, as `Trainer` does with any other mean. For ULD's loss, a mean over samples, this equals one large batch; for
the divergence before 1.7.0 it does if all micro-batches have the same number of tokens. The patch adds no collective.
GKD on one rank, GOLD on one rank without gradient accumulation, evaluation, Liger's losses, and images (whose tokens
are not counted) stay bit for bit identical.

Not repaired:

- **tokens that the student generates** (`lmbda` above 0): TRL divides them by the number of tokens that the data set
  has in their place, because transformers counts those; their gradients get the same factors.
  `trl-gkd-generated-count` repairs the number;
- Liger's losses up to 1.13.0, which have the same bug;
- `DistillationTrainer` in 1.7.0 to 1.8.0; 1.9.0 repairs it;
- GKD before 1.7.0, which `transformers-accumulation-scale` repairs. That patch does not repair GOLD, and logs so.

The patch does not change a loss, `compute_loss`, `training_step`, `get_batch_samples`, `_get_num_items_in_batch` or
`accelerator.backward` that is not TRL's, transformers' or accelerate's own (in a subclass, by assignment or within a
decorator), and logs its name in one line on rank 0. Such code may correct the size already. The same applies to GOLD
with its own `get_train_dataloader` or `_get_train_sampler`, which may yield each token once, and to a training loop, a
`_clip_grad_norm` or a hook of a parameter's gradient of your own.""",
    changes_numbers="""\
Let A be `gradient_accumulation_steps` and N the number of ranks. Since TRL 1.7.0, GKD trained on gradients 1 / N times
their size, and GOLD on gradients 1 / (A N) times their size. With `use_uld_loss` or before 1.7.0, GOLD trained on
gradients A times their size. With the patch gradients and the logged loss have their correct size. If a run was tuned
without the patch, multiply its clipping threshold by the factor by which the gradient grows, and with SGD divide its
learning rate by it; with Adam, the factor matters only for clipping and epsilon. Remove your own corrections, for
example in a callback or an optimizer.""",
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
    obsolete_when="when the oldest trl in use scales both losses by itself; no release so far does",
    conditions=(
        Condition(_GKD, f"{__package__}._conditions:part_of_all_ranks", "gradient x"),
        Condition(_GOLD, f"{__package__}._conditions:part_of_micro_batches", "gradient x"),
    ),
)
