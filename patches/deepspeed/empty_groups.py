"""A learning-rate scheduler and the empty parameter groups that DeepSpeed removes from its optimizer."""

from __future__ import annotations

import contextlib
import gc
import sys
from typing import Any

import rlhf_patches
from rlhf_patches import Condition, Guard, Patch, Rewrite, Signature, Variant

from .. import _released

_NAME = "deepspeed-empty-groups"
_KNOWN = ("torch", "deepspeed", "transformers", "accelerate")
"""Packages whose functions may make a scheduler's step."""
_SCHEDULERS = ("torch.optim.lr_scheduler", "deepspeed.runtime.lr_schedules")
"""The modules whose functions pair rates with groups by position."""


class AllGroups:
    """An optimizer with the groups that a scheduler was made for, removed groups back at their positions.

    Only functions of torch's and DeepSpeed's schedulers that pair them with a list of full length see these groups;
    all other code sees the optimizer's own list. All attributes except ``param_groups`` are the optimizer's own, and
    assignments go to the optimizer. The object is equal to the optimizer and an instance of its class, because code
    that makes a scheduler from another one checks both.
    """

    __slots__ = ("__weakref__", "_all_groups_of", "_all_groups_removed", "_all_groups_reported")

    def __init__(
        self, optimizer: Any, removed: list[tuple[int, dict[str, Any]]], reported: list[str] | None = None
    ) -> None:
        """Stand in for an optimizer.

        Args:
            optimizer: a ``torch.optim.Optimizer``.
            removed: for each removed group its index among all groups, ascending, and the group.
            reported: empty until this optimizer's run has been reported; None for a copy, which reports nothing.
        """
        object.__setattr__(self, "_all_groups_of", optimizer)
        object.__setattr__(self, "_all_groups_removed", removed)
        object.__setattr__(self, "_all_groups_reported", [_NAME] if reported is None else reported)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's own list, or all groups if the caller pairs them with a list of as many.

        Loading a state replaces the optimizer's groups, so the removed ones are added in each call.
        """
        groups: list[dict[str, Any]] = self._all_groups_of.param_groups
        removed = self._all_groups_removed
        caller = sys._getframe(1)  # known: `_pairs_all` asks for a scheduler's own code and its full list
        if not _pairs_all(caller, [index for index, _ in removed], len(groups) + len(removed)):
            return groups
        if not self._all_groups_reported:
            self._all_groups_reported.append(_NAME)
            rlhf_patches.decided(_NAME, True)
        groups = list(groups)
        for index, group in removed:
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


def _pairs_all(frame: Any, removed: list[int], full: int) -> bool:
    """Whether a function pairs the groups with a list for all of them, and wrongly if some are missing.

    Since 2.10, torch raises for two lengths. Without that check, the released pairing is right if each remaining group
    gets the same from it.
    """
    # known: the module that a function was written in, whatever its name is
    if frame.f_globals.get("__name__") not in _SCHEDULERS:
        return False
    try:
        paired = _paired(frame)
        if paired is None or len(paired) != full:
            return False
        base = getattr(sys.modules[_SCHEDULERS[0]], "LRScheduler", None)
        if frame.f_globals["__name__"] == _SCHEDULERS[0] and hasattr(base, "_update_lr"):
            return True
        left = [each for index, each in enumerate(paired) if index not in removed]
        return any(one is not other and bool(one != other) for one, other in zip(paired, left, strict=False))
    except Exception:  # the scheduler's class and lists may be anybody's
        return False


# known: the names of torch's and DeepSpeed's own functions and of their locals, checked to be theirs by the module
def _paired(frame: Any) -> Any:
    """What a function of torch's or DeepSpeed's pairs with the groups by position; None if it pairs nothing."""
    scheduler, name, own = frame.f_locals.get("self"), frame.f_code.co_name, frame.f_locals
    if scheduler is None or _released.others(scheduler, "step", "_update_lr", packages=_KNOWN):
        return None
    if name == "get_lr":
        if "momentums" in own:  # CyclicLR
            return own["momentums"]
        for kind, lists in (("MultiplicativeLR", "lr_lambdas"), ("CosineAnnealingLR", "base_lrs")):
            if frame.f_code is getattr(sys.modules[_SCHEDULERS[0]], kind).get_lr.__code__:
                return getattr(scheduler, lists)
        return None
    if name == "_reduce_lr":  # the default is one rate for all groups, whose number the function adapts
        return None if getattr(scheduler, "default_min_lr", None) is not None else scheduler.min_lrs
    if name not in ("step", "_update_lr") or "lr" in own:  # the loop is over: it reads the rates that it has set
        return None
    if "values" in own:
        return own["values"]
    if "momentums" in own:  # DeepSpeed's OneCycle
        return own["momentums"]
    # These ask for the groups first, and for the rates next. A user's get_lr() is not called twice.
    if _released.others(scheduler, "get_lr", packages=_KNOWN) or not getattr(
        scheduler, "_get_lr_called_within_step", True
    ):
        return None
    return scheduler.get_lr()


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
    reported: list[str] = []
    # By type(): isinstance() would read __class__, and lazy objects import a module for that.
    for one in [client, *(item for item in gc.get_objects() if issubclass(type(item), base))]:
        # The class may be anybody's: an `optimizer` that cannot be read or assigned is not changed.
        with contextlib.suppress(Exception):
            # A scheduler made before an empty group was added fits the remaining groups.
            if one.optimizer is optimizer and len(getattr(one, "base_lrs", groups)) == len(groups):
                one.optimizer = AllGroups(optimizer, removed, reported)  # writes: this is the repair


_REMOVAL = '$OPTIMIZER.param_groups[:] = [pg for pg in $OPTIMIZER.param_groups if len(pg["params"]) != 0]'

PATCH = Patch(
    name=_NAME,
    summary="a scheduler sets the learning rates of the right groups after DeepSpeed has removed empty ones",
    harm="wrong gradient",
    bug="a scheduler sets the learning rates of the wrong parameter groups, or its first step raises",
    when="an optimizer with an empty parameter group (LoRA), and a scheduler made before deepspeed.initialize()",
    symptom="""\
The bug affects LoRA with DeepSpeed, trained with transformers before 5.1 and its dependents (TRL, LLaMA-Factory), or
with a trainer that makes its scheduler early (ms-swift, earlier OpenRLHF). With torch 2.10 or later, the first step of
the scheduler raises `ValueError: zip() argument 2 is longer than argument 1`. With an older torch, and with DeepSpeed's
own schedulers passed as objects, no error is raised: the groups after an empty group get the learning rate of the group
before them. With PEFT's LoRA+, the B matrices get the learning rate of the embeddings, 1e-6.""",
    cause="""\
These trainers make one group with weight decay and one without. With LoRA, the second group is empty. `DeepSpeedEngine`
removes empty groups from the optimizer in place, after the trainer has made the scheduler. The scheduler has a learning
rate for each of the original groups, and pairs them by position with the remaining groups. Since 2.10, torch raises if
the two lengths differ.""",
    repair="""\
Some functions of torch's and of DeepSpeed's schedulers pair the groups with a list that has an entry for each group.
These functions see all groups, with the empty groups at their positions. All other code sees the optimizer's own
groups. For that, the `optimizer` of the schedulers is a stand-in: it is equal to the optimizer, is an instance of its
class, and is identical to it in everything but `param_groups`. DeepSpeed works without the empty groups, as before.

A scheduler whose lists you have changed to those of the remaining groups works as before. So does one whose optimizer
gets an empty group back, one whose `get_lr()` returns as many rates as groups remain, and one with your own `step()` or
`_update_lr()`. The same holds for a `get_lr()` of yours whose rates the patch cannot count: a generator, or in a
subclass of `CosineAnnealingWarmRestarts` or of DeepSpeed's schedulers.

The patch detects schedulers that derive from torch's `LRScheduler` whether or not they were passed to
`deepspeed.initialize`, and DeepSpeed's own if they were passed. It does not detect a scheduler that `gc.freeze()` hides
from the garbage collector, unless it was passed. The format of a scheduler's state does not change, so checkpoints fit
with and without the patch. A scheduler that you pickle as a whole, instead of its state, needs this package to be
loaded. A scheduler that is made afterwards (a callable passed as `lr_scheduler`, one from DeepSpeed's configuration,
that of transformers since 5.1) sees the remaining groups, as before. If no group is empty, the patch does nothing.""",
    changes_numbers="""\
Since DeepSpeed 0.3.13, groups after an empty group were trained at another group's learning rate, if torch was older
than 2.10, the first release that checks this. It matters if the learning rates differ: with PEFT's LoRA+, the B
matrices had the learning rate of the embeddings, and the configured ratio had no effect. With the patch, each group has
its configured learning rate. If you tuned a run without the patch, check its learning rates again. Training can
continue from its checkpoints.""",
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
