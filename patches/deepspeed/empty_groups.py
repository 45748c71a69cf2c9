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
"""Whose schedulers pair rates with groups by position, or by what the groups themselves hold."""
_SETTERS = ("step", "_update_lr")
"""The functions of torch's that set the rates which get_lr() has given."""


class AllGroups:
    """An optimizer with the groups that a scheduler was made for: the removed ones at their places again.

    Everything but ``param_groups`` is the optimizer's own, what is assigned included; and it is equal to the optimizer
    and an instance of its class, which those ask that make a scheduler from others.
    """

    __slots__ = ("__weakref__", "_all_groups_for", "_all_groups_of", "_all_groups_removed")

    def __init__(self, optimizer: Any, removed: list[tuple[int, dict[str, Any]]], scheduler: Any = None) -> None:
        """Stand in for an optimizer.

        Args:
            optimizer: a ``torch.optim.Optimizer``.
            removed: of each removed group its index among all groups, ascending, and the group.
            scheduler: which has it as its optimizer; None of a copy.
        """
        object.__setattr__(self, "_all_groups_of", optimizer)
        object.__setattr__(self, "_all_groups_removed", removed)
        made_for = None
        with contextlib.suppress(TypeError):  # a class of which there are no weak references
            made_for = None if scheduler is None else weakref.ref(scheduler)
        object.__setattr__(self, "_all_groups_for", made_for)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """From the optimizer's present groups: loading its state puts others in their place.

        As they are, where the scheduler has a learning rate for each of these: a user has put an empty group back, or
        has taken its rate from the scheduler's, or lets its get_lr() give none for it. So where its steps are a user's.
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

    # writes: what is assigned to the stand-in, the optimizer gets
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


# known: within torch's function `values` is what get_lr(), which may be a user's, has returned for this very step
def _sets_those(scheduler: Any, left: int) -> bool:
    """Whether who asks for the groups has, or may have, a learning rate for each one that is left, and no others.

    A step of a user's own may, and so may his get_lr() where torch asks it afterwards, or counts nothing.
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
    """Let the schedulers of an optimizer see all its groups, although the empty ones are about to be removed.

    Most trainers keep their scheduler to themselves, and an optimizer does not know its schedulers. They are looked for
    among all live objects, only if a group is empty: some tenths of a second, once.

    Args:
        optimizer: a ``torch.optim.Optimizer``.
        client: DeepSpeed's ``lr_scheduler`` argument: a scheduler of any class, something to call, or None.
    """
    groups = optimizer.param_groups
    removed = [(index, group) for index, group in enumerate(groups) if len(group["params"]) == 0]
    if not removed:
        rlhf_patches.decided(_NAME, False)
        return
    from torch.optim import lr_scheduler

    base = getattr(lr_scheduler, "LRScheduler", None) or lr_scheduler._LRScheduler
    by_position = False
    # By type(): isinstance() would ask objects for __class__, which lazy ones answer by an import.
    for one in [client, *(item for item in gc.get_objects() if issubclass(type(item), base))]:
        # Anybody's class: an `optimizer` that cannot be asked for or assigned is left as it is.
        with contextlib.suppress(Exception):
            # One that was made before an empty group was added fits the groups that are left.
            if one.optimizer is optimizer and len(getattr(one, "base_lrs", groups)) == len(groups):
                one.optimizer = AllGroups(optimizer, removed, one)  # writes: this is the repair
                by_position = by_position or _pairs_wrongly(one, removed, base)
    if by_position:  # of other schedulers, and of those that are made afterwards, it is not known
        rlhf_patches.decided(_NAME, True)


def _pairs_wrongly(scheduler: Any, removed: list[tuple[int, dict[str, Any]]], base: Any) -> bool:
    """Whether it is certain that a scheduler gives groups that are left the rates of others, or raises.

    Others go by what the groups themselves hold.
    """
    from torch.optim import lr_scheduler

    torchs = lr_scheduler.LambdaLR
    # One that steps in a way of its own may have met the bug.
    if any(getattr(type(scheduler), name, None) is not getattr(torchs, name) for name in ("get_lr", "step")):
        return False
    if _released.others(scheduler, "get_lr", "step", "_update_lr", packages=("torch",)):
        return False
    if hasattr(base, "_update_lr"):  # torch 2.10 and later, which refuse two lengths
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
LoRA with DeepSpeed and torch 2.10 or later, by transformers before 5.1 and what builds on it (TRL, LLaMA-Factory), or
by a trainer that makes its scheduler early itself (ms-swift, earlier OpenRLHF):
`ValueError: zip() argument 2 is longer than argument 1` at the first step of the scheduler. With an older torch, and
with DeepSpeed's own schedulers passed as objects, there is no error: the groups behind an empty one get their
predecessor's learning rate. With PEFT's LoRA+ the B matrices get that of the embeddings, 1e-6.""",
    cause="""\
These trainers make one group with weight decay and one without, and with LoRA the second is empty. `DeepSpeedEngine`
removes empty groups from the optimizer, in place, and the scheduler was made before: it has a learning rate for each of
the original groups, and pairs them by position with those that are left. From 2.10 on, torch refuses two lengths.""",
    repair="""\
The schedulers of the optimizer still see all its groups, the empty ones in their places, by a stand-in as their
`optimizer`: equal to the optimizer, an instance of its class, and itself in everything but `param_groups`. DeepSpeed
works without the empty groups, as before. A scheduler whose `base_lrs` are made those of the groups that are left sees
these, and so does one of an optimizer that gets an empty group back, one whose `get_lr()` gives as many rates as groups
are left, and one with a `step()` or `_update_lr()` of your own. So does one with a `get_lr()` of your own whose rates
cannot be counted: a generator's, and those of a subclass of `CosineAnnealingWarmRestarts`. Schedulers that derive from
torch's `LRScheduler` are found whether they were passed to `deepspeed.initialize` or not, those of any other class if
they were. Their state keeps its form, so checkpoints fit with and without the patch. A scheduler that is made
afterwards (a callable passed as `lr_scheduler`, one of DeepSpeed's configuration, that of transformers from 5.1 on)
knows the groups that are left, as before. Where no group is empty, nothing is done.""",
    changes_numbers="""\
Since DeepSpeed 0.3.13, without torch 2.10's check, groups behind an empty one were trained at another group's learning
rate. It matters where the rates differ: with PEFT's LoRA+ the B matrices had the rate of the embeddings, and the ratio
that was set had no effect. With the patch each group has the rate that it was given. A run that was tuned with another
one should have its learning rates looked at again; checkpoints can be trained on.""",
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
        "when no trainer in use makes its scheduler before DeepSpeed removes groups, as transformers 5.1 does not"
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
