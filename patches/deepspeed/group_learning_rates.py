"""``WarmupLR`` without ``warmup_max_lr`` warms each parameter group up to its own learning rate."""

from __future__ import annotations

import sys
from typing import Any

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

from .. import _released

_MODULE = "deepspeed.runtime.lr_schedules"


def of_groups(scheduler: Any, rates: list[Any]) -> Any:
    """The default of ``warmup_max_lr``: the learning rate of each group.

    For a scheduler with user code, which may set each group's rate itself, it is the first group's, as released.

    Args:
        scheduler: a ``WarmupLR``.
        rates: of its optimizer's groups.
    """
    # known: DeepSpeed's own functions take a list, and do not multiply by a group's own rate
    return rates[0] if replaced(scheduler) else rates


def replaced(scheduler: Any) -> str:
    """The name of the first user-defined part that computes learning rates; empty if all parts are DeepSpeed's."""
    packages = ("deepspeed",)
    # known: only a class defined in that module has this name; a subclass defined elsewhere is a user's
    if type(scheduler).__module__ != _MODULE:
        return type(scheduler).__name__
    # A function of the module sets the learning rates of a step.
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
The optimizer's parameter groups have different learning rates (a value head, LoRA+, embeddings), and the DeepSpeed
configuration has `"scheduler": {"type": "WarmupLR"}` without `warmup_max_lr`. During and after the warm-up, every group
has the learning rate of the first group. No error is raised. `get_last_lr()` returns the same number for every
group.""",
    cause="""\
In 0.17.2, `warmup_max_lr` defaults to the optimizer's learning rates, but the code takes only element `[0]` of the
list. All groups use this number.""",
    repair="""\
The patch uses the whole list, as 0.19.4 does. An explicit `warmup_max_lr` works as before, as one number for all groups
or as a list.

The patch does not change a subclass of your own, or a scheduler whose `__init__`, `get_lr`, `step`, `_format_param` or
`update_lr` was replaced before the scheduler was made: such code may give each group its learning rate already. The
patch does not detect code that replaces them afterwards: remove it if it gives each group its rate. It does not repair
`WarmupCosineLR` of 0.18.9 and earlier, which sets the learning rate of the first group alone to 0 for the first
step.""",
    changes_numbers="""\
DeepSpeed 0.17.2 to 0.19.3 trained all parameter groups at the first group's learning rate. With the patch, each group
has its own learning rate, as set in the optimizer. If you tuned a run without the patch, check the learning rates of
all groups but the first. If your code multiplies the scheduler's `max_lrs`, or the groups' learning rates after a step,
by each group's ratio, remove that code.""",
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
