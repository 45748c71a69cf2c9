"""Relations between the model's parameters and the optimizer's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from .relation import Relation, Verdict, not_checked

OPTIMIZER = "optimizer parameters"
TRAINED = "trainable parameters"
_SHOWN = 3


def optimizers(optimizer: Any, named: Mapping[str, torch.nn.Parameter]) -> Relation:
    """Check that the optimizer holds the model's parameters that require a gradient, by identity.

    Args:
        optimizer: the trainer's optimizer.
        named: the model's parameters, without wrappers.
    """
    groups = getattr(optimizer, "param_groups", None)
    if not groups:
        return not_checked(OPTIMIZER, f"{type(optimizer).__name__} has no param_groups")
    theirs = {id(parameter) for group in groups for parameter in group["params"]}
    if _is_deepspeeds(named):
        return not_checked(OPTIMIZER, "DeepSpeed's optimizer holds partitions")
    if "Dummy" in type(getattr(optimizer, "optimizer", optimizer)).__name__:
        return not_checked(OPTIMIZER, f"{type(optimizer).__name__} is a placeholder")
    trainable = {name: each for name, each in named.items() if each.requires_grad}
    missing = [name for name, each in trainable.items() if id(each) not in theirs]
    strangers = theirs - {id(each) for each in named.values()}
    if not missing and not strangers:
        return Relation(OPTIMIZER, Verdict.HOLDS, f"{len(trainable)} of {len(trainable)}")
    problems = []
    if missing:
        problems.append(f"the optimizer lacks {len(missing)} that require a gradient: {shown(missing)}")
    if strangers:
        problems.append(
            f"the optimizer has {len(strangers)} that the model lacks: from another model or a replaced module"
        )
    deviation = f"{len(trainable) - len(missing)} of {len(trainable)}"
    return Relation(OPTIMIZER, Verdict.DEVIATES, deviation, "; ".join(problems))


class SeenGradients:
    """Records which of the parameters that require a gradient got one in the window.

    Args:
        named: the model's parameters, without wrappers.
        trained: those that required a gradient when the window began.
    """

    def __init__(self, named: Mapping[str, torch.nn.Parameter], trained: Iterable[torch.nn.Parameter]) -> None:
        began = {id(each) for each in trained}
        self._names = [name for name, each in named.items() if id(each) in began]
        self._frozen = len(named) - len(self._names)
        self._thawed = [name for name, each in named.items() if each.requires_grad and id(each) not in began]
        self._froze = [name for name, each in named.items() if not each.requires_grad and id(each) in began]
        low = [name for name in self._names if named[name].dtype in (torch.bfloat16, torch.float16)]
        self._coarse = [] if _is_deepspeeds(named) else low
        self._none: list[str] = []
        self._zero: list[str] = []

    def noted(self, gradients: Iterable[torch.Tensor | None]) -> Iterator[torch.Tensor | None]:
        """Yield the gradients unchanged, and record those that are missing or zero."""
        for name, gradient in zip(self._names, gradients, strict=True):
            if gradient is None:
                self._none.append(name)
            elif not bool(gradient.any()):
                self._zero.append(name)
            yield gradient

    def relation(self) -> Relation:
        """Return a deviation if the window froze or unfroze parameters; a note if parameters got no gradient."""
        counts = f"{len(self._names)} trained, {self._frozen} frozen"
        notes = []
        if self._thawed:
            notes.append(
                f"{len(self._thawed)} that were frozen require a gradient after the window: {shown(self._thawed)}"
            )
        if self._froze:
            notes.append(f"{len(self._froze)} that were trained are frozen after the window: {shown(self._froze)}")
        if self._none:
            notes.append(f"{len(self._none)} require a gradient and got none: {shown(self._none)}")
        if self._zero:
            notes.append(f"{len(self._zero)} got a zero gradient: {shown(self._zero)}")
        if self._coarse:
            lost = "small updates are rounded away unless the optimizer keeps float32 copies"
            notes.append(f"{len(self._coarse)} are in bfloat16 or float16: {lost}")
        verdict = Verdict.DEVIATES if self._thawed or self._froze else Verdict.NOTE if notes else Verdict.HOLDS
        return Relation(TRAINED, verdict, counts, "; ".join(notes))


def _is_deepspeeds(named: Mapping[str, torch.nn.Parameter]) -> bool:
    """Whether a ZeRO optimizer holds float32 partitions of the parameters."""
    return any(hasattr(each, "ds_id") or hasattr(each, "_hp_mapping") for each in named.values())


def shown(names: Iterable[str]) -> str:
    """Return the first few names and the number of the others."""
    names = [*names]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
