"""Relations of a model's parameters and its optimizer's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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


def trained(named: Mapping[str, torch.nn.Parameter], gradients: Mapping[str, torch.Tensor | None]) -> Relation:
    """Which parameters that require a gradient got none in the window; a note, for it may be meant."""
    trainable = [name for name, each in named.items() if each.requires_grad]
    none = [name for name in trainable if gradients.get(name) is None]
    zero = [name for name in trainable if (each := gradients.get(name)) is not None and not bool(each.any())]
    frozen = sum(not each.requires_grad for each in named.values())
    counts = f"{len(trainable)} trained, {frozen} frozen"
    said = []
    if none:
        said.append(f"{len(none)} require a gradient and got none: {shown(none)}")
    if zero:
        said.append(f"{len(zero)} got zeros: {shown(zero)}")
    if not said:
        return Relation(TRAINED, Verdict.HOLDS, counts)
    return Relation(TRAINED, Verdict.NOTE, counts, "; ".join(said))


def shown(names: Iterable[str]) -> str:
    """The first few of many names."""
    names = [*names]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
