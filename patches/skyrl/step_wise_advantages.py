"""SkyRL's step-wise training: each step's tokens get the advantage of its trajectory."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_TARGET = "skyrl.train.trainer:RayPPOTrainer.compute_advantages_and_returns"
_OURS = f"{__package__}._steps"


def _of_each_step(values: str) -> Rewrite:
    return Rewrite(
        _TARGET,
        f"last_step_{values}[traj_ids]",
        f"$OWN(last_step_{values}[traj_ids], response_mask, adv_estimator)",
        alongside=('is_last_step = data["is_last_step"].bool()',),
        uses={"OWN": f"{_OURS}:of_own_tokens"},
    )


PATCH = Patch(
    name="skyrl-step-wise-advantages",
    summary="with step-wise trajectories, all tokens of each step have the advantage of their trajectory",
    harm="wrong gradient",
    bug="steps that are longer than the last step of their trajectory are trained on a part of their tokens",
    when="generator.step_wise_trajectories=True with GRPO or RLOO, and steps that are longer than the last one",
    excluded_by=("generator.step_wise_trajectories=absent|false",),
    symptom="""\
With `generator.step_wise_trajectories=true` SkyRL 0.1.0 trains a step of a trajectory only up to the length of the last
step. All later tokens have the advantage 0. If the last step is a short answer, most tokens of the steps before it are
not trained. Their share in the mean over tokens makes the whole gradient smaller. No error.""",
    cause="""\
The trainer computes the advantages of the last steps, and copies them to the other steps of the trajectory. They are
already multiplied by the response mask of the last step.""",
    repair="""\
As in 0.2.0, the patch computes the advantage without a mask, copies it, and multiplies it by each step's own mask. Runs
without step-wise trajectories stay bit for bit what they are, and so do last steps. An estimator of your own stays as
released, under any name, and so do GAE and REINFORCE++: their advantages differ between tokens. SkyRL 0.2.0 refuses
these two with step-wise trajectories.""",
    changes_numbers="""\
With SkyRL 0.1.0 and step-wise trajectories, tokens beyond the length of the last step were not trained. With the patch
they are, so gradients are larger. Training can continue from existing checkpoints; review a learning rate that was
tuned without the patch.""",
    references=("https://github.com/NovaSky-AI/SkyRL/issues/1492", "https://github.com/NovaSky-AI/SkyRL/pull/1507"),
    variants=(
        Variant(
            Guard("skyrl", ">=0.1.0,<0.2.0"),
            (
                Rewrite(
                    _TARGET,
                    "response_mask[is_last_step]",
                    "$MASK(response_mask, is_last_step, adv_estimator)",
                    alongside=('is_last_step = data["is_last_step"].bool()',),
                    uses={"MASK": f"{_OURS}:mask_of_last_steps"},
                ),
                _of_each_step("advantages"),
                _of_each_step("returns"),
            ),
        ),
    ),
    obsolete_when="when the oldest SkyRL in use is 0.2.0",
    conditions=(Condition(_TARGET, f"{_OURS}:are_trained"),),
)
