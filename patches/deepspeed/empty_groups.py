"""A learning-rate scheduler and the empty parameter groups that DeepSpeed removes from its optimizer."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from typing import Any

import rlhf_patches
from rlhf_patches import Condition, Guard, Patch, Rewrite, Signature, Variant

from .. import _released

_NAME = "deepspeed-empty-groups"
_KNOWN = ("torch", "deepspeed", "transformers", "accelerate")
"""Packages whose schedulers pair rates with groups by position, or read what the groups themselves hold."""
_SETTERS = ("step", "_update_lr")
"""Functions of torch that set the rates which get_lr() returns."""


class AllGroups:
    """An optimizer with the groups that a scheduler was made for, removed groups back at their positions.

    All attributes except ``param_groups`` are the optimizer's own, and assignments go to the optimizer. The object is
    equal to the optimizer and an instance of its class, because code that makes a scheduler from another one checks
    both.
    """

    __slots__ = ("__weakref__", "_all_groups_for", "_all_groups_of", "_all_groups_removed")

    def __init__(self, optimizer: Any, removed: list[tuple[int, dict[str, Any]]], scheduler: Any = None) -> None:
        """Stand in for an optimizer.

        Args:
            optimizer: a ``torch.optim.Optimizer``.
            removed: for each removed group its index among all groups, ascending, and the group.
            scheduler: the scheduler that has this object as its optimizer; None for a copy.
        """
        object.__setattr__(self, "_all_groups_of", optimizer)
        object.__setattr__(self, "_all_groups_removed", removed)
        made_for = None
        with contextlib.suppress(TypeError):  # a class without weak references
            made_for = None if scheduler is None else weakref.ref(scheduler)
        object.__setattr__(self, "_all_groups_for", made_for)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's present groups and the removed ones; loading a state replaces the optimizer's groups.

        Returns the optimizer's groups alone if the scheduler has a learning rate for each of them: a user has put an
        empty group back, has removed its rate from the scheduler's, or has a get_lr() that returns none for it. It does
        so too if the scheduler's steps are a user's.
        """
        groups = list(self._all_groups_of.param_groups)
        scheduler = self._all_groups_for and self._all_groups_for()
        rates = getattr(scheduler, "base_lrs", None)
        if rates is not None and len(rates) == len(groups):
            return groups
        if scheduler is not None and _sets_those(scheduler, len(groups)):
            return groups
        for index, group in self._all_groups_removed:
            groups.insert(index, group)
        return groups

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._all_groups_of)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._all_groups_of, name)

    # writes: an assignment to the stand-in goes to the optimizer
    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._all_groups_of, name, value)

    # writes: as above
    def __delattr__(self, name: str) -> None:
        delattr(self._all_groups_of, name)

    def __eq__(self, other: object) -> bool:
        return bool(self._all_groups_of == (other._all_groups_of if type(other) is AllGroups else other))

    def __hash__(self) -> int:
        return hash(self._all_groups_of)

    def __repr__(self) -> str:
        return repr(self._all_groups_of)

    def __reduce__(self) -> Any:
        return AllGroups, (self._all_groups_of, self._all_groups_removed)


# known: in torch's function `values` is what get_lr(), which may be a user's, has returned for this step
def _sets_those(scheduler: Any, left: int) -> bool:
    """Whether the caller has, or may have, a learning rate for each remaining group and for no other group.

    A user's own step may, and so may a user's get_lr() if torch calls it afterwards, or does not count its rates.
    """
    if _released.others(scheduler, "step", "_update_lr", packages=_KNOWN):
        return True
    frame = sys._getframe(2)
    if frame.f_globals.get("__name__") != "torch.optim.lr_scheduler" or frame.f_code.co_name not in _SETTERS:
        return False
    try:
        return len(frame.f_locals["values"]) == left
    except (KeyError, TypeError):
        return bool(_released.others(scheduler, "get_lr", packages=_KNOWN))


def keep_for_schedulers(optimizer: Any, client: Any) -> None:
    """Let the schedulers of an optimizer see all its groups although DeepSpeed is about to remove empty ones.

    Most trainers keep their scheduler to themselves, and an optimizer does not know its schedulers. This function
    searches all live objects, only if a group is empty. The search takes some tenths of a second, once.

    Args:
        optimizer: a ``torch.optim.Optimizer``.
        client: DeepSpeed's ``lr_scheduler`` argument: a scheduler of any class, a callable, or None.
    """
    groups = optimizer.param_groups
    removed = [(index, group) for index, group in enumerate(groups) if len(group["params"]) == 0]
    if not removed:
        rlhf_patches.decided(_NAME, False)
        return
    from torch.optim import lr_scheduler

    base = getattr(lr_scheduler, "LRScheduler", None) or lr_scheduler._LRScheduler
    by_position = False
    # By type(): isinstance() would read __class__, and lazy objects import a module for that.
    for one in [client, *(item for item in gc.get_objects() if issubclass(type(item), base))]:
        # The class may be anybody's: an `optimizer` that cannot be read or assigned is not changed.
        with contextlib.suppress(Exception):
            # A scheduler made before an empty group was added fits the remaining groups.
            if one.optimizer is optimizer and len(getattr(one, "base_lrs", groups)) == len(groups):
                one.optimizer = AllGroups(optimizer, removed, one)  # writes: this is the repair
                by_position = by_position or _pairs_wrongly(one, removed, base)
    if by_position:  # unknown for other schedulers, and for those that are made later
        rlhf_patches.decided(_NAME, True)


def _pairs_wrongly(scheduler: Any, removed: list[tuple[int, dict[str, Any]]], base: Any) -> bool:
    """Whether a scheduler certainly gives remaining groups the rates of other groups, or raises.

    Other schedulers read what the groups themselves hold.
    """
    from torch.optim import lr_scheduler

    torchs = lr_scheduler.LambdaLR
    # A scheduler with its own way to step may account for the bug.
    if any(getattr(type(scheduler), name, None) is not getattr(torchs, name) for name in ("get_lr", "step")):
        return False
    if _released.others(scheduler, "get_lr", "step", "_update_lr", packages=("torch",)):
        return False
    if hasattr(base, "_update_lr"):  # torch 2.10 and later raise for two lengths
        return True
    without = {index for index, _ in removed}
    rates = scheduler.base_lrs
    left = [rate for index, rate in enumerate(rates) if index not in without]
    return bool(rates[: len(left)] != left)


_REMOVAL = '$OPTIMIZER.param_groups[:] = [pg for pg in $OPTIMIZER.param_groups if len(pg["params"]) != 0]'

PATCH = Patch(
    name=_NAME,
    summary="a scheduler sets the learning rates of the right groups after DeepSpeed has removed empty ones",
    harm="wrong gradient",
    bug="a scheduler sets the learning rates of the wrong parameter groups, or its first step raises",
    when="an optimizer with an empty parameter group (LoRA), and a scheduler made before deepspeed.initialize()",
    symptom="""\
LoRA with DeepSpeed and torch 2.10 or later, trained with transformers before 5.1 and its dependents (TRL,
LLaMA-Factory), or with a trainer that makes its scheduler early (ms-swift, earlier OpenRLHF): the first step of the
scheduler raises `ValueError: zip() argument 2 is longer than argument 1`. With an older torch, and with DeepSpeed's own
schedulers passed as objects, no error is raised: the groups after an empty group get the learning rate of the group
before them. With PEFT's LoRA+, the B matrices get the learning rate of the embeddings, 1e-6.""",
    cause="""\
These trainers make one group with weight decay and one without. With LoRA, the second group is empty. `DeepSpeedEngine`
removes empty groups from the optimizer in place, after the trainer has made the scheduler. The scheduler has a learning
rate for each of the original groups, and pairs them by position with the remaining groups. Since 2.10, torch raises if
the two lengths differ.""",
    repair="""\
The schedulers of the optimizer still see all its groups, with the empty groups at their positions. Their `optimizer` is
a stand-in: it is equal to the optimizer, is an instance of its class, and is identical to it in everything but
`param_groups`. DeepSpeed works without the empty groups, as before.

These schedulers see the remaining groups: one whose `base_lrs` are changed to those of the remaining groups, one whose
optimizer gets an empty group back, one whose `get_lr()` returns as many rates as groups remain, and one with your own
`step()` or `_update_lr()`. The same holds for your own `get_lr()` if its rates cannot be counted, such as a
generator's, and those of a subclass of `CosineAnnealingWarmRestarts`.

The patch detects schedulers that derive from torch's `LRScheduler` whether or not they were passed to
`deepspeed.initialize`, and schedulers of any other class if they were passed. The format of their state does not
change, so checkpoints fit with and without the patch. A scheduler that is made afterwards (a callable passed as
`lr_scheduler`, one from DeepSpeed's configuration, that of transformers since 5.1) sees the remaining groups, as
before. If no group is empty, the patch does nothing.""",
    changes_numbers="""\
Since DeepSpeed 0.3.13, without torch 2.10's check, groups after an empty group were trained at another group's learning
rate. This matters if the learning rates differ: with PEFT's LoRA+, the B matrices had the learning rate of the
embeddings, and the configured ratio had no effect. With the patch, each group has its configured learning rate. If you
tuned a run without the patch, check its learning rates again. Training can continue from its checkpoints.""",
    references=(
        "https://github.com/huggingface/transformers/pull/43692",
        "https://github.com/huggingface/transformers/pull/43711",
        "https://github.com/modelscope/ms-swift/issues/8299",
        "https://github.com/OpenRLHF/OpenRLHF/issues/1225",
        "https://github.com/hiyouga/LlamaFactory/issues/10141",
        "https://github.com/deepspeedai/DeepSpeedExamples/pull/756",
    ),
    variants=(
        Variant(
            Guard("deepspeed", ">=0.3.13,<=0.19.8"),
            (
                Rewrite(
                    target="deepspeed.runtime.engine:DeepSpeedEngine._configure_optimizer",
                    pattern=_REMOVAL,
                    replacement=f"$KEEP($OPTIMIZER, self.client_lr_scheduler); {_REMOVAL}",
                    uses={"KEEP": f"{__name__}:{keep_for_schedulers.__name__}"},
                ),
            ),
        ),
    ),
    obsolete_when=(
        "when no trainer in use makes its scheduler before DeepSpeed removes groups; transformers 5.1 does not"
    ),
    signatures=(
        Signature(
            "ValueError",
            "zip() argument 2 is longer than argument 1",
            frames=("torch.optim.lr_scheduler:LRScheduler._update_lr",),
            specific=False,
        ),
    ),
    conditions=(Condition("deepspeed.runtime.engine:DeepSpeedEngine._configure_optimizer"),),
)
