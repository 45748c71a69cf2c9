"""verl's trainers, resumed at the end of an epoch: train the next epoch."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_USES = {"CONTINUED": f"{__package__}._resumed:epoch_to_continue"}
_LOOP = "for epoch in range({}, self.config.trainer.total_epochs):\n    $$$BODY"


def _sft(module: str, trainer: str = "SFTTrainer") -> Rewrite:
    epoch = "global_step // self.steps_per_epoch"
    return Rewrite(
        target=f"verl.trainer.{module}:{trainer}.fit",
        pattern=f"start_epoch = {epoch}",
        replacement=f"start_epoch = $CONTINUED(self, {epoch}, global_step, self.train_dataloader)",
        alongside=("global_step = self.resume_global_step", _LOOP.format("start_epoch")),
        uses=_USES,
    )


def _ppo(target: str, *unless: str) -> Rewrite:
    epoch = "self.global_steps // len(self.train_dataloader)"
    return Rewrite(
        target=f"verl.trainer.{target}.fit",
        pattern=f"current_epoch = {epoch}",
        replacement=f"current_epoch = $CONTINUED(self, {epoch}, self.global_steps, self.train_dataloader)",
        alongside=("self._load_checkpoint()", _LOOP.format("current_epoch")),
        unless=unless,
        uses=_USES,
    )


_SFT = (_sft("sft_trainer"), _sft("sft_trainer_ray"))
_OLD = _sft("fsdp_sft_trainer", "FSDPSFTTrainer")
# From 0.8.0 on, it does not load a loader's state that is at the end of an epoch.
_RAY = _ppo("ppo.ray_trainer:RayPPOTrainer", "self._shutdown_dump_executor()")
_SYNC = _ppo("main_ppo_sync:PPOTrainer")

PATCH = Patch(
    name="verl-resume-epoch",
    summary="a run that resumes from the last step of an epoch trains the next epoch",
    harm="wrong data",
    bug="a run that resumes from the last step of an epoch skips the next epoch, and ends with status 0",
    when="supervised fine-tuning (0.7.0 and 0.8.0 also PPO), resumed from a checkpoint of an epoch's last step",
    excluded_by=("trainer.resume_mode=disable",),
    symptom="""\
A run of `sft_trainer` resumes from the checkpoint that it has written in the last step of an epoch: it trains 0 batches
in the next epoch, which counts as trained, and continues with the one after it. The run ends one epoch too early, with
status 0, and without the checkpoint and the evaluation of the last step. If one epoch was left, it trains nothing.
`trainer.save_freq=after_each_epoch` writes such checkpoints only. RayPPOTrainer of 0.7.0 and 0.7.1, and the synchronous
PPO trainer of 0.8.0, do the same.""",
    cause="""\
The checkpoint is written before the loader knows that its epoch is over: its state says that all batches were yielded,
and its next iteration yields none. `fit` computes the epoch to start with from the number of steps, which is already
the next epoch's. So the iteration that ends the old epoch is taken for the new one.""",
    repair="""\
If the loader continues from a state without a batch left, and the number of steps is that of whole epochs, the loop
starts one epoch earlier. The loader then ends that epoch without a batch, and the next one has the samples, in the
order, of an uninterrupted run. Runs that do not resume, that resume from another step, or that have no step left are
not affected. Neither are runs whose checkpoint has no state of a loader, or the state of another number of batches per
epoch, and trainers whose loader or sampler is not a class of torch or torchdata: a sampler of your own
(`data.sampler`) may begin its next order by itself. Not repaired: RayPPOTrainer from 0.8.0 on, which trains that epoch
in the first epoch's order.""",
    changes_numbers="""\
Since verl 0.6.0, a run of supervised fine-tuning that resumed from the last step of an epoch was trained for one epoch
less. To train the missing epoch, resume again from the checkpoint before it.""",
    references=(
        "https://github.com/verl-project/verl/issues/7401",
        "https://github.com/verl-project/verl/pull/7402",
        "https://github.com/verl-project/verl/pull/7974",
    ),
    variants=(
        Variant(Guard("verl", ">=0.6.0,<0.7.0"), (_SFT[0], _OLD), independent=True),
        Variant(Guard("verl", ">=0.7.0,<0.7.1"), (*_SFT, _OLD, _RAY), independent=True),
        Variant(Guard("verl", ">=0.7.1,<0.8.0"), (*_SFT, _RAY), independent=True),
        Variant(Guard("verl", ">=0.8.0,<0.9.0"), (*_SFT, _SYNC), independent=True),
        Variant(Guard("verl", ">=0.9.0,<=0.9.1"), _SFT, independent=True),
    ),
    obsolete_when="when the oldest verl in use trains that epoch; 0.9.1, the newest, does not",
    conditions=tuple(Condition(change.target) for change in (*_SFT, _OLD, _RAY, _SYNC)),
)
