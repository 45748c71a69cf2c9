"""SkyRL's trainer, resumed at the end of an epoch: train the next epoch."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_TARGET = "skyrl.train.trainer:RayPPOTrainer.train"
_EPOCH = "self.global_step // len(self.train_dataloader)"

PATCH = Patch(
    name="skyrl-resume-epoch",
    summary="a run that resumes from the last step of an epoch trains the next epoch",
    harm="wrong data",
    bug="a run that resumes from the last step of an epoch skips the next epoch, and ends without an error",
    when="RayPPOTrainer resumed from a checkpoint of an epoch's last step; 0.2.0 and later write one in each epoch",
    excluded_by=("trainer.resume_mode=none",),
    symptom="""\
A run resumes from the checkpoint that it has written in the last step of an epoch: it trains 0 batches in the next
epoch, which counts as trained, and continues with the one after it. The run ends one epoch too early, without an error.
If one epoch was left, it trains nothing. SkyRL 0.2.0 and later write such a checkpoint at the end of each epoch, 0.1.0
where `ckpt_interval` divides the number of steps of an epoch.""",
    cause="""\
The checkpoint is written before the loader knows that its epoch is over: its state says that all batches were yielded,
and its next iteration yields none. `train` computes the epoch to start with from the number of steps, which is already
the next epoch's. So the iteration that ends the old epoch is taken for the new one.""",
    repair="""\
If the loader continues from a state without a batch left, and the number of steps is that of whole epochs, the loop
starts one epoch earlier. The loader then ends that epoch without a batch, and the next one has all its batches. Their
order is not that of an uninterrupted run, as after a resume within an epoch: torchdata's iterators draw from the
generator of the order. Callbacks (0.3.0, 0.4.0) see the old epoch begin and end once more, without a step. Runs that
do not resume, that resume from another step, or that have no step left are not affected. Neither are runs with dynamic
sampling, where a step takes several batches; runs whose checkpoint has no state of a loader, or the state of another
number of batches per epoch; and trainers whose loader or sampler is not a class of torch or torchdata, or that have
their own `train`, such as FullyAsyncRayPPOTrainer.""",
    changes_numbers="""\
Since SkyRL 0.1.0, a run that resumed from the last step of an epoch was trained for one epoch less. To train the
missing epoch, resume again from the checkpoint before it.""",
    references=(
        "https://github.com/NovaSky-AI/SkyRL/blob/main/skyrl/train/trainer.py",
        "https://github.com/verl-project/verl/issues/7401",
    ),
    variants=(
        Variant(
            Guard("skyrl", ">=0.1.0,<=0.4.0"),
            (
                Rewrite(
                    target=_TARGET,
                    pattern=f"start_epoch = {_EPOCH}",
                    replacement=f"start_epoch = $CONTINUED(self, {_EPOCH})",
                    alongside=(
                        "self.global_step, _ = self.load_checkpoints()",
                        "for epoch in range(start_epoch, self.cfg.trainer.epochs):\n    $$$BODY",
                    ),
                    uses={"CONTINUED": f"{__package__}._resumed:epoch_to_continue"},
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest SkyRL in use trains that epoch; 0.4.0, the newest, does not",
    conditions=(Condition(_TARGET),),
)
