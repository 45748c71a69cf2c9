"""A micro-batch cut into its rows, each without its padding, or a packed row into its documents.

By itself each has the gradient that it has among the others, where no row, padding or document reaches another.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from . import ranks, states, window
from .ranks import Mine
from .relation import Relation, Verdict

ROWS, DOCUMENTS = "rows one by one", "documents one by one"
_OF_TOKENS = ("input_ids", "labels", "attention_mask", "position_ids")
_LOSSES = "transformers.loss."
_MEANS = ("transformers.trainer", "trl.trainer.sft_trainer")
_MOST = 8
"""Of a micro-batch's rows, or of a row's documents; the others are left out of it."""


@dataclass(frozen=True)
class Cut:
    """What a relation compares.

    Args:
        name: of the relation.
        whole: inputs of all the pieces together.
        pieces: inputs of each by itself.
        why: why there are none; empty where there are.
    """

    name: str = ROWS
    whole: Mapping[str, Any] | None = None
    pieces: tuple[Mapping[str, Any], ...] = ()
    why: str = ""


def cut(inputs: Any) -> Cut:
    """A causal model's micro-batch, or another one whose rows are known to be one example each.

    Args:
        inputs: as the loss gets them: ``input_ids`` with ``labels`` of the same shape, or one label for each row.
    """
    if not isinstance(inputs, Mapping):
        return Cut(why=f"the micro-batch is {type(inputs).__name__}, no mapping")
    given = {name: value for name, value in inputs.items() if value is not None}
    ids, labels = given.get("input_ids"), given.get("labels")
    if not (isinstance(ids, torch.Tensor) and isinstance(labels, torch.Tensor) and ids.dim() == 2):
        return Cut(why="the micro-batch has no input_ids with labels")
    if others := sorted({*given} - {*_OF_TOKENS}):
        return Cut(why=f"what {others[0]} has of each row is not known")
    for name, value in given.items():
        whole = isinstance(value, torch.Tensor) and value.shape == ids.shape
        if not whole and not (name == "labels" and labels.shape == ids.shape[:1] and not labels.is_floating_point()):
            return Cut(why=f"{name} has another shape than input_ids")
    starts = _starts(given.get("position_ids"))
    if ids.shape[0] > 1:
        return Cut(why="rows of several documents") if starts is None or len(starts) > 1 else _rows(given)
    if starts is not None and len(starts) > 1 and labels.dim() == 2:
        return _documents(given, starts)
    return Cut(why="the micro-batch has one row")


def _starts(positions: torch.Tensor | None) -> list[int] | None:
    """Where documents of one row begin; of several rows None if one of them has more than one."""
    if positions is None:
        return [0]
    new = (positions[:, 1:] == 0) & (positions[:, :-1] != 0)
    if positions.shape[0] > 1:
        return None if bool(new.any()) else [0]
    return [0, *(int(each) + 1 for each in new[0].nonzero()[:, 0])]


def _rows(given: Mapping[str, torch.Tensor]) -> Cut:
    whole = {name: value[:_MOST] for name, value in given.items()}
    made = []
    for row in range(len(whole["input_ids"])):
        piece = {name: value[row : row + 1] for name, value in whole.items()}
        if (mask := piece.get("attention_mask")) is not None:
            real = mask[0].nonzero()[:, 0]
            if not len(real):
                return Cut(why="a row is all padding")
            # To the left it may stay, where positions are counted from.
            piece = {name: each[:, : int(real[-1]) + 1] if each.dim() == 2 else each for name, each in piece.items()}
        made.append(piece)
    return Cut(ROWS, whole, tuple(made))


def _documents(given: Mapping[str, torch.Tensor], starts: list[int]) -> Cut:
    ends = [*starts[1:], given["input_ids"].shape[1]][:_MOST]
    whole = {name: value[:, : ends[-1]] for name, value in given.items()}
    made = tuple(
        {name: value[:, start:end] for name, value in given.items()} for start, end in zip(starts, ends, strict=False)
    )
    return Cut(DOCUMENTS, whole, made)


def unknown(trainer: Any, model: torch.nn.Module) -> str:
    """Why rows may reach each other on purpose; empty where the loss is known to be a mean over tokens or rows."""
    if written_in(type(trainer).compute_loss) not in _MEANS or getattr(trainer, "compute_loss_func", None) is not None:
        return f"whether {type(trainer).__name__}'s loss is a mean over rows is not known"
    loss = getattr(base(model), "loss_function", None)  # a model may be given another one
    of_loss = str(getattr(loss, "__module__", None))
    if not (kind(model).__module__.startswith("transformers.") and (loss is None or of_loss.startswith(_LOSSES))):
        return f"whether {kind(model).__name__}'s loss is a mean over rows is not known"
    for name, each in model.named_modules():
        if each.training and isinstance(each, torch.nn.modules.batchnorm._BatchNorm):
            return f"{name} normalises over rows"
    return ""


def written_in(function: Any) -> str:
    """The module of a function's code: told by what no decorator copies."""
    return str(getattr(function, "__globals__", {}).get("__name__"))


def base(model: torch.nn.Module) -> torch.nn.Module:
    """A model without ``torch.compile``'s wrapper and PEFT's."""
    plain: torch.nn.Module = getattr(model, "_orig_mod", model)
    return plain.get_base_model() if type(plain).__module__.startswith("peft.") else plain


def kind(model: torch.nn.Module) -> type:
    """The class of a model's base, of which FSDP2 makes another one."""
    return next(each for each in type(base(model)).__mro__ if not each.__name__.startswith("FSDP"))


def judge(name: str, found: Mine, noise: float) -> Relation:
    """Hold the gradient of all the pieces at once, ``found.used``, against their own."""
    laws = {law.replace("micro-batch", "piece"): weights for law, weights in ranks.laws([found]).items()}
    judged = window.judge(found.used, found.own, laws, noise)
    measured = f"{judged.deviation:.0e}" if judged.law else f"{judged.deviation:.2g}"
    if judged.law:
        return Relation(name, Verdict.HOLDS, measured, f"{judged.law} (noise {noise:.0e})")
    if judged.factor is not None:
        return Relation(name, Verdict.DEVIATES, measured, f"{judged.factor:.3f} x {judged.nearest}")
    what = "padding or another row reaches a row" if name == ROWS else "another document reaches a document"
    return Relation(name, Verdict.DEVIATES, measured, f"of the gradient: {what}")


def without_dropout(model: torch.nn.Module) -> AbstractContextManager[bool]:
    """Meanwhile nothing of a model drops: by the numbers that modules keep, of which each begins where it was."""
    found = []
    for module in model.modules():
        own = vars(module)
        found += [(own, name) for name, value in own.items() if name.endswith("dropout") and isinstance(value, float)]
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            found.append((own, "p"))
    return states.zeroed(found)
