"""GRPO with Liger's loss and tools: tool results are not trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

from .. import _released
from . import _liger_loss

_NAME = "trl-grpo-liger-tools"


def of_the_model(trainer: Any, inputs: Mapping[str, Any]) -> Callable[..., Any]:
    """Liger's loss over the completion tokens ``[B, T]`` that the model wrote; without tools the trainer's loss itself.

    Args:
        trainer: its ``liger_grpo_loss`` takes the mask of its tokens as ``attention_mask``, by name. Another loss than
            Liger's own may mask the tools itself, and stays.
        inputs: the batch. ``tool_mask`` is 0 for tokens of a tool or an environment.
    """
    loss: Callable[..., Any] = trainer.liger_grpo_loss
    tool_mask = inputs.get("tool_mask")
    if tool_mask is None:
        return loss
    other = _liger_loss.other(trainer)
    if other:
        _released.left(_NAME, other)
        return loss

    def computed(*args: Any, attention_mask: Any, **kwargs: Any) -> Any:
        return loss(*args, attention_mask=attention_mask * tool_mask, **kwargs)

    return computed


PATCH = Patch(
    name=_NAME,
    summary="GRPO with Liger's loss does not train on tool results",
    harm="wrong gradient",
    affects_rollouts=True,
    bug="with Liger's loss the tokens of tool results are trained on as the model's own",
    when="GRPOTrainer with use_liger_kernel, and tools or an env_mask",
    excluded_by=("use_liger_kernel=false|absent", "trl=sft|dpo|kto|reward|rloo"),
    symptom="""\
`GRPOTrainer` with `use_liger_kernel=True` and `tools` (from 0.28.0 on, or a rollout function that returns an
`env_mask`): the policy is trained to write tool results, or not to, by the conversation's advantage, and the loss is a
mean over their tokens too. `kl` and `clip_ratio` count them. No error.""",
    cause="""\
`compute_liger_loss` passes the mask of the completions to Liger, tool results included; without Liger the loss is
masked with `tool_mask` as well.""",
    repair="""\
The patch passes the product of both masks to Liger, as in 0.29.0. The model attends to tool results as before. Without
tools Liger gets the very arguments that TRL passes. So does a loss of your own in place of `trainer.liger_grpo_loss`,
or Liger's in a `compute_liger_loss` of your own: it may mask tool results itself.""",
    changes_numbers="""\
Since TRL 0.26.0, GRPO with Liger and tools trained on tool results, and divided by the number of their tokens too.
With the patch loss, gradient norm and KL divergence cover only the model's own tokens, and are not comparable with
earlier values.""",
    references=("https://github.com/huggingface/trl/pull/4975",),
    variants=(
        Variant(
            Guard("trl", ">=0.26.0,<0.29.0"),
            (
                Rewrite(
                    target="trl.trainer.grpo_trainer:GRPOTrainer.compute_liger_loss",
                    pattern="self.liger_grpo_loss",
                    replacement="$OF_THE_MODEL(self, inputs)",
                    inside="self.liger_grpo_loss($$$)",
                    alongside=('inputs["completion_mask"]',),
                    unless=("loss_mask",),
                    uses={"OF_THE_MODEL": f"{__name__}:{of_the_model.__name__}"},
                ),
            ),
            where_defined=("trl.trainer.grpo_trainer:GRPOTrainer._tool_call_loop",),
        ),
    ),
    obsolete_when="when the oldest trl in use is 0.29.0",
    conditions=(
        Condition("trl.trainer.grpo_trainer:GRPOTrainer.compute_liger_loss", f"{__package__}._conditions:has_tools"),
    ),
)
