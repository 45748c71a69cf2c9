"""GRPO, RLOO and others with their sampler: a run that is resumed after the first epoch goes on in its own order."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Rewrite, Variant

_OURS = f"{__package__}._epochs_over"


def _changes(module: str) -> tuple[Rewrite, ...]:
    return (
        Rewrite(
            target=f"{module}:RepeatSampler.__init__",
            pattern="torch.Generator()",
            inside="self.generator = torch.Generator()",
            alongside=("self.generator.manual_seed(seed)",),
            unless=("self.epoch",),
            replacement="$NOTED(self, torch.Generator())",
            uses={"NOTED": f"{_OURS}:noted"},
        ),
        Rewrite(
            target=f"{module}:RepeatSampler.__iter__",
            pattern="self.generator",
            alongside=("torch.randperm(self.num_samples, generator=self.generator)",),
            # Of a release whose order is one of an epoch's number.
            unless=("self.epoch", "$GENERATOR.manual_seed($$$)", "torch.Generator($$$)"),
            replacement="$ADVANCED(self)",
            uses={"ADVANCED": f"{_OURS}:advanced"},
        ),
    )


PATCH = Patch(
    name="trl-resume-order",
    summary="GRPO, RLOO and TRL's other trainers on RepeatSampler resume in the order of the epoch they are in",
    harm="wrong data",
    bug="a run that is resumed after its first epoch repeats some prompts of the epoch and never sees others",
    when="GRPOTrainer, RLOOTrainer, GOLDTrainer, ... with resume_from_checkpoint, in the second epoch or a later one",
    excluded_by=("ignore_data_skip=true",),
    symptom="""\
`GRPOTrainer`, `RLOOTrainer` and the others with their sampler (GOLD, Distillation, SDPO, SDFT, SSD, IW-OPD), resumed
from a checkpoint in the second epoch or a later one, go on in the first epoch's order. The prompts that this order has
in front are left out, though the epoch has had others: some come twice in the epoch, others never. The epochs that
follow have the second's order, the third's, and so on. No error: nothing shows but another course of the reward.""",
    cause="""\
`RepeatSampler` draws the order of each epoch from a generator that is seeded once, when the sampler is made. Nobody can
tell it which epoch it is: it has no `set_epoch`, and `Trainer` leaves the epochs that are over out, without a pass
through the sampler. So the first order that a resumed run draws is that of the first epoch.""",
    repair="""\
When a resumed run draws its first order, it draws those of the epochs that are over before it: as many as `Trainer`
leaves out. That epoch and those after it then have the prompts, and the order, of a run without a stop. A run that is
not resumed, or resumed in its first epoch, evaluation, `shuffle_dataset=False` and `ignore_data_skip=True` stay bit
for bit what they are.

Not repaired: a sampler of a subclass with an `__init__` or a `set_epoch` of its own; one that is not made in
`_get_train_sampler`; streamed data sets, which have none; loaders that sequence parallelism or a TPU has put into
others; and TRL 0.15 and 0.16, whose sampler is another class with the same fault. What a checkpoint between two
generations has lost (completions that more steps were to use) is still lost.""",
    references=("https://github.com/huggingface/trl/blob/v1.16.0/trl/trainer/utils.py",),
    variants=(
        Variant(Guard("trl", ">=0.17.0,<0.22.0"), _changes("trl.trainer.grpo_trainer")),
        Variant(Guard("trl", ">=0.22.0,<=1.16.0"), _changes("trl.trainer.utils")),
    ),
    obsolete_when="when the oldest trl in use can tell its sampler the epoch; none released so far can",
)
