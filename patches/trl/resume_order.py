"""GRPO, RLOO and others with their sampler: a run that resumes after the first epoch keeps its order of prompts."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_OURS = f"{__package__}._epochs_over"
_MODULES = ("trl.trainer.grpo_trainer", "trl.trainer.utils")


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
            # A release whose order depends on the epoch's number.
            unless=("self.epoch", "$GENERATOR.manual_seed($$$)", "torch.Generator($$$)"),
            replacement="$ADVANCED(self)",
            uses={"ADVANCED": f"{_OURS}:advanced"},
        ),
    )


PATCH = Patch(
    name="trl-resume-order",
    summary="GRPO, RLOO and TRL's other trainers on RepeatSampler resume in the order of their current epoch",
    harm="wrong data",
    bug="a run that resumes after its first epoch repeats some prompts of the epoch and never sees others",
    when="GRPOTrainer, RLOOTrainer, GOLDTrainer, ... with resume_from_checkpoint, in the second epoch or a later one",
    excluded_by=("ignore_data_skip=true",),
    symptom="""\
`GRPOTrainer`, `RLOOTrainer` and the others with their sampler (GOLD, Distillation, SDPO, SDFT, SSD, IW-OPD), resumed
from a checkpoint in the second epoch or a later one, continue in the first epoch's order. The run skips the first
prompts of this order, although the epoch has already had others. So some prompts come twice in the epoch, and others
never. The following epochs use the second epoch's order, the third's, and so on. No error: only the reward curve
differs.""",
    cause="""\
`RepeatSampler` draws the order of each epoch from a generator that is seeded once, when the sampler is created. The
sampler does not know the epoch: it has no `set_epoch`, and `Trainer` skips finished epochs without a pass through the
sampler. So the first order that a resumed run draws is that of the first epoch.""",
    repair="""\
Before a resumed run draws its first order, the patch draws the orders of the finished epochs: as many as `Trainer`
skips. The current epoch and the following ones then have the prompts, and the order, of an uninterrupted run. A run
that does not resume, or resumes in its first epoch, evaluation, `shuffle_dataset=False` and `ignore_data_skip=True`
stay bit for bit identical.

Not repaired: a sampler of a subclass with its own `__init__` or `set_epoch`; a sampler that is not created in
`_get_train_sampler`; streamed data sets, which have no sampler; loaders that sequence parallelism or a TPU has wrapped;
and TRL 0.15 and 0.16, whose sampler is another class with the same bug. A checkpoint between two generations still
loses completions that later steps would have used.""",
    references=("https://github.com/huggingface/trl/blob/v1.16.0/trl/trainer/utils.py",),
    variants=(
        Variant(Guard("trl", ">=0.17.0,<0.22.0"), _changes(_MODULES[0])),
        Variant(Guard("trl", ">=0.22.0,<=1.16.0"), _changes(_MODULES[1])),
    ),
    obsolete_when="when the oldest trl in use can pass the epoch to its sampler; no release so far can",
    conditions=tuple(Condition(f"{module}:RepeatSampler.__iter__") for module in _MODULES),
)
