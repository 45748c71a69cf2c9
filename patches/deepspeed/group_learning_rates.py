"""``WarmupLR`` without ``warmup_max_lr``: each parameter group is warmed up to its own learning rate."""

from __future__ import annotations

import sys
from typing import Any

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

from .. import _released

_MODULE = "deepspeed.runtime.lr_schedules"


def of_groups(scheduler: Any, rates: list[Any]) -> Any:
    """What ``warmup_max_lr`` is where none is given: each group's, and the first one's as released for a scheduler with
    code of somebody else's, which may make each group's rate of that number itself.

    Args:
        scheduler: a ``WarmupLR``.
        rates: of its optimizer's groups.
    """
    # known: DeepSpeed's own functions take a list, and multiply by no group's own rate
    return rates[0] if replaced(scheduler) else rates


def replaced(scheduler: Any) -> str:
    """What of that which makes learning rates is somebody else's; empty where all is DeepSpeed's."""
    packages = ("deepspeed",)
    # known: only a class that is defined there has such a name; what derives from it elsewhere is a user's
    if type(scheduler).__module__ != _MODULE:
        return type(scheduler).__name__
    # Which sets the rates of a step: a function of the module.
    update = getattr(sys.modules.get(_MODULE), "update_lr", None)
    if update is not None and not _released.is_released(update, packages):
        return "update_lr"
    return _released.others(scheduler, "__init__", "_format_param", "get_lr", "step", packages=packages)


PATCH = Patch(
    name="deepspeed-group-learning-rates",
    summary="WarmupLR warms each parameter group up to its own learning rate, not all to the first one's",
    harm="wrong gradient",
    bug="WarmupLR gives every parameter group the learning rate of the first one",
    when="scheduler WarmupLR without warmup_max_lr, and groups with learning rates of their own",
    symptom="""\
A DeepSpeed configuration with `"scheduler": {"type": "WarmupLR"}` and no `warmup_max_lr`, and an optimizer whose
parameter groups have learning rates of their own (a value head, LoRA+, embeddings): after the warm-up, and all through
it, every group has the learning rate of the first one. No error; `get_last_lr()` shows the same number for each.""",
    cause="""\
0.17.2 lets `warmup_max_lr` default to what the optimizer has, and takes `[0]` of the list of learning rates. One number
then stands for all groups.""",
    repair="""\
The whole list is taken, as in 0.19.4. A `warmup_max_lr` that is given counts as before, one number for all groups or a
list. Not repaired: a subclass of your own, and a scheduler with an `__init__`, a `get_lr`, a `step` or a
`_format_param` that was put in place of DeepSpeed's, or an `update_lr`: they may give each group its rate already; and
`WarmupCosineLR` of 0.18.9 and earlier, which sets the learning rate of the first group alone to 0 for the first
step.""",
    changes_numbers="""\
DeepSpeed 0.17.2 to 0.19.3 trained all parameter groups at the first group's learning rate. With the patch each has its
own, as its optimizer was given. A run that was tuned with it should have all groups but the first looked at again. Who
multiplies what a scheduler has made, its `max_lrs` or the groups' rates after a step, by each group's ratio has to take
that out.""",
    references=(
        "https://github.com/deepspeedai/DeepSpeed/pull/8171",
        "https://github.com/deepspeedai/DeepSpeed/pull/7360",
    ),
    variants=(
        Variant(
            Guard("deepspeed", ">=0.17.2,<0.19.4"),
            (
                Rewrite(
                    target=f"{_MODULE}:WarmupLR.__init__",
                    pattern="[group['lr'] for group in self.optimizer.param_groups][0]",
                    replacement="$OF_GROUPS(self, [group['lr'] for group in self.optimizer.param_groups])",
                    alongside=('self.max_lrs = self._format_param(self.optimizer, warmup_max_lr, "max_lr")',),
                    uses={"OF_GROUPS": f"{__name__}:{of_groups.__name__}"},
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest DeepSpeed in use is 0.19.4",
    conditions=(Condition(f"{_MODULE}:WarmupLR.__init__", f"{__package__}._conditions:rates_of_groups"),),
)
