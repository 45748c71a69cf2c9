"""GRPO with Liger's loss and tools: what the tools returned is not trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant


def of_the_model(loss: Callable[..., Any], inputs: Mapping[str, Any]) -> Callable[..., Any]:
    """Liger's ``loss``, of the completions' tokens ``[B, T]`` that the model has written; without tools the very one.

    Args:
        loss: takes what it is to be over as ``attention_mask``, by name.
        inputs: the batch. ``tool_mask`` has 0 where a tool, or an environment, has written.
    """
    tool_mask = inputs.get("tool_mask")
    if tool_mask is None:
        return loss

    def computed(*args: Any, attention_mask: Any, **kwargs: Any) -> Any:
        return loss(*args, attention_mask=attention_mask * tool_mask, **kwargs)

    return computed


PATCH = Patch(
    name="trl-grpo-liger-tools",
    summary="GRPO with Liger's loss does not train on what tools return",
    harm="wrong gradient",
    affects_rollouts=True,
    bug="with Liger's loss the tokens of tool results are trained on as the model's own",
    when="GRPOTrainer with use_liger_kernel, and tools or an env_mask",
    excluded_by=("use_liger_kernel=false|absent",),
    symptom="""\
`GRPOTrainer` with `use_liger_kernel=True` and `tools` (from 0.28.0 on, or a rollout function that returns an
`env_mask`): the policy is trained to write tool results, or not to, by the conversation's advantage, and the loss is a
mean over their tokens too. `kl` and `clip_ratio` count them. No error.""",
    cause="""\
`compute_liger_loss` hands Liger the mask of the completions, tool results included; without Liger the loss is masked
with `tool_mask` as well.""",
    repair="""\
Liger gets the product of both masks, as in 0.29.0. The model attends to tool results as before. Without tools it gets
the very arguments that it got.""",
    changes_numbers="""\
Since TRL 0.26.0, GRPO with Liger and tools trained on what the tools returned, and divided by the number of these
tokens too. With the patch loss, gradient norm and KL divergence are of the model's own tokens, and not to be compared
with those before.""",
    references=("https://github.com/huggingface/trl/pull/4975",),
    variants=(
        Variant(
            Guard("trl", ">=0.26.0,<0.29.0"),
            (
                Rewrite(
                    target="trl.trainer.grpo_trainer:GRPOTrainer.compute_liger_loss",
                    pattern="self.liger_grpo_loss",
                    replacement="$OF_THE_MODEL(self.liger_grpo_loss, inputs)",
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
