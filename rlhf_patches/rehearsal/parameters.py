"""Relations of a model's parameters and its optimizer's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from .relation import Relation, Verdict, not_held

OPTIMIZER = "the optimizer's parameters"
TRAINED = "trained and frozen"
_SHOWN = 3


def optimizers(optimizer: Any, named: Mapping[str, torch.nn.Parameter]) -> Relation:
    """Whether an optimizer has those of the model that require a gradient, by identity.

    Args:
        optimizer: as the trainer holds it.
        named: the model's parameters, without wrappers.
    """
    groups = getattr(optimizer, "param_groups", None)
    if not groups:
        return not_held(OPTIMIZER, f"{type(optimizer).__name__} has no param_groups")
    theirs = {id(parameter) for group in groups for parameter in group["params"]}
    if _is_deepspeeds(named):
        return not_held(OPTIMIZER, "DeepSpeed's has partitions of them")
    if "Dummy" in type(getattr(optimizer, "optimizer", optimizer)).__name__:
        return not_held(OPTIMIZER, f"{type(optimizer).__name__} only stands for one")
    trainable = {name: each for name, each in named.items() if each.requires_grad}
    missing = [name for name, each in trainable.items() if id(each) not in theirs]
    strangers = theirs - {id(each) for each in named.values()}
    if not missing and not strangers:
        return Relation(OPTIMIZER, Verdict.HOLDS, f"{len(trainable)} of {len(trainable)}")
    said = []
    if missing:
        said.append(f"{len(missing)} that require a gradient are not in it: {shown(missing)}")
    if strangers:
        said.append(
            f"{len(strangers)} of its own are not the model's: an older model's, or of a part that was replaced"
        )
    deviation = f"{len(trainable) - len(missing)} of {len(trainable)}"
    return Relation(OPTIMIZER, Verdict.DEVIATES, deviation, "; ".join(said))


class Told:
    """Which parameters that require a gradient got one in the window, noted as they are read.

    Args:
        named: the model's parameters, without wrappers.
        trained: those of them that required a gradient when the window began.
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
        """The same gradients, of each parameter that requires one."""
        for name, gradient in zip(self._names, gradients, strict=True):
            if gradient is None:
                self._none.append(name)
            elif not bool(gradient.any()):
                self._zero.append(name)
            yield gradient

    def relation(self) -> Relation:
        """A deviation where the window froze or unfroze some; a note where some got none, for it may be meant."""
        counts = f"{len(self._names)} trained, {self._frozen} frozen"
        said = []
        if self._thawed:
            said.append(
                f"{len(self._thawed)} that were frozen require a gradient after the window: {shown(self._thawed)}"
            )
        if self._froze:
            said.append(f"{len(self._froze)} that were trained are frozen after the window: {shown(self._froze)}")
        if self._none:
            said.append(f"{len(self._none)} require a gradient and got none: {shown(self._none)}")
        if self._zero:
            said.append(f"{len(self._zero)} got zeros: {shown(self._zero)}")
        if self._coarse:
            lost = "small updates are rounded away unless the optimizer keeps float32 copies"
            said.append(f"{len(self._coarse)} are in bfloat16 or float16 themselves, where {lost}")
        verdict = Verdict.DEVIATES if self._thawed or self._froze else Verdict.NOTE if said else Verdict.HOLDS
        return Relation(TRAINED, verdict, counts, "; ".join(said))


def _is_deepspeeds(named: Mapping[str, torch.nn.Parameter]) -> bool:
    """Whether a ZeRO optimizer has partitions of a model's parameters, in float32."""
    return any(hasattr(each, "ds_id") or hasattr(each, "_hp_mapping") for each in named.values())


def shown(names: Iterable[str]) -> str:
    """The first few of many names."""
    names = [*names]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
