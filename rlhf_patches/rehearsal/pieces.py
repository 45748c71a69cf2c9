"""Splits a micro-batch into rows without padding, or a packed row into documents.

If rows, padding and documents do not affect each other, each piece has the same gradient alone and in the batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from . import ranks, sketches, states, window
from .ranks import Mine
from .relation import Relation, Verdict

ROWS, DOCUMENTS = "per-row gradients", "per-document gradients"
_OF_TOKENS = ("input_ids", "labels", "attention_mask", "position_ids")
_LOSSES = "transformers.loss."
_MEANS = ("transformers.trainer", "trl.trainer.sft_trainer")
_MOST = 8
"""The largest number of rows or documents that are compared; the others are left out."""


@dataclass(frozen=True)
class Cut:
    """The inputs that a relation compares.

    Args:
        name: the relation's name.
        whole: the inputs of all pieces together.
        pieces: the inputs of each piece alone.
        why: why there are no pieces; empty if there are.
    """

    name: str = ROWS
    whole: Mapping[str, Any] | None = None
    pieces: tuple[Mapping[str, Any], ...] = ()
    why: str = ""


def cut(inputs: Any) -> Cut:
    """Split a micro-batch of a causal model, or of another model whose rows are one example each.

    Args:
        inputs: the loss's inputs: ``input_ids`` with ``labels`` of the same shape, or with one label per row.
    """
    if not isinstance(inputs, Mapping):
        return Cut(why=f"the micro-batch is a {type(inputs).__name__}, not a mapping")
    given = {name: value for name, value in inputs.items() if value is not None}
    ids, labels = given.get("input_ids"), given.get("labels")
    if not (isinstance(ids, torch.Tensor) and isinstance(labels, torch.Tensor) and ids.dim() == 2):
        return Cut(why="the micro-batch has no input_ids with labels")
    if others := sorted({*given} - {*_OF_TOKENS}):
        return Cut(why=f"{others[0]} is not known to have one entry per row")
    for name, value in given.items():
        whole = isinstance(value, torch.Tensor) and value.shape == ids.shape
        if not whole and not (name == "labels" and labels.shape == ids.shape[:1] and not labels.is_floating_point()):
            return Cut(why=f"{name} and input_ids differ in shape")
    begin = starts(given.get("position_ids"))
    if ids.shape[0] > 1:
        return Cut(why="rows have several documents") if begin is None or len(begin) > 1 else _rows(given)
    if begin is not None and len(begin) > 1 and labels.dim() == 2:
        return _documents(given, begin)
    return Cut(why="the micro-batch has one row")


def starts(positions: torch.Tensor | None) -> list[int] | None:
    """Return where the documents of one row begin; for several rows, None if a row has several documents."""
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
                return Cut(why="a row has only padding")
            # Padding on the left stays: positions are counted from it.
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
    """Return why rows may affect each other by design; empty if the loss is a mean over tokens or rows."""
    if written_in(type(trainer).compute_loss) not in _MEANS or getattr(trainer, "compute_loss_func", None) is not None:
        return f"{type(trainer).__name__}'s loss is not known to be a mean over rows"
    loss = getattr(base(model), "loss_function", None)  # users can replace a model's loss function
    of_loss = str(getattr(loss, "__module__", None))
    if not (kind(model).__module__.startswith("transformers.") and (loss is None or of_loss.startswith(_LOSSES))):
        return f"{kind(model).__name__}'s loss is not known to be a mean over rows"
    return normalizes(model)


def normalizes(model: torch.nn.Module) -> str:
    """Return which module normalizes over rows; empty if none does."""
    for name, each in model.named_modules():
        if each.training and isinstance(each, torch.nn.modules.batchnorm._BatchNorm):
            return f"{name} normalizes over rows"
    return ""


def written_in(function: Any) -> str:
    """Return the module of a function's code, from its globals, which no decorator copies."""
    return str(getattr(function, "__globals__", {}).get("__name__"))


def base(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model without the wrappers of FSDP1, ``torch.compile`` and PEFT."""
    plain: torch.nn.Module = getattr(model, "_orig_mod", model)
    if type(plain).__name__ == "FullyShardedDataParallel":
        plain = plain.module
    return plain.get_base_model() if type(plain).__module__.startswith("peft.") else plain


def kind(model: torch.nn.Module) -> type:
    """Return the class of the base model; FSDP2 replaces it by a subclass."""
    return next(each for each in type(base(model)).__mro__ if not each.__name__.startswith("FSDP"))


def judge(name: str, gradients: Mine, noise: float) -> Relation:
    """Compare the gradient of all pieces together, ``gradients.used``, with the gradients of the pieces."""
    units = "rows" if name == ROWS else "documents"
    laws = {law.replace("micro-batches", units): weights for law, weights in ranks.laws([gradients]).items()}
    judged = window.judge(gradients.used, gradients.own, laws, noise)
    measured = f"{judged.deviation:.0e}" if judged.law else f"{judged.deviation:.2g}"
    if judged.law:
        return Relation(name, Verdict.HOLDS, measured, f"{judged.law} (noise {noise:.0e})")
    if judged.factor is not None:
        return Relation(name, Verdict.DEVIATES, measured, f"{judged.factor:.3f} x {judged.nearest}")
    what = "padding or another row affects a row" if name == ROWS else "another document affects a document"
    return Relation(name, Verdict.DEVIATES, measured, f"relative gradient error: {what}")


@contextlib.contextmanager
def embeddings_moved(model: torch.nn.Module) -> Iterator[None]:
    """Move what the input embeddings return by a unit in the last place within the context."""

    def moved(_module: Any, _inputs: Any, made: torch.Tensor) -> torch.Tensor:
        signs = sketches.signs(0, made.numel(), 0, made.device).view(made.shape)
        return made * (1 + torch.finfo(made.dtype).eps * signs).to(made.dtype)

    plain: Any = base(model)
    if hasattr(plain, "get_input_embeddings"):
        embeddings = plain.get_input_embeddings()
    else:
        embeddings = next(each for each in plain.modules() if isinstance(each, torch.nn.Embedding))
    hook = embeddings.register_forward_hook(moved)
    try:
        yield
    finally:
        hook.remove()


def without_dropout(model: torch.nn.Module) -> AbstractContextManager[bool]:
    """Disable a model's dropout within the context: set the modules' dropout probabilities to 0, then restore them."""
    rates = []
    for module in model.modules():
        own = vars(module)
        rates += [(own, name) for name, value in own.items() if name.endswith("dropout") and isinstance(value, float)]
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            rates.append((own, "p"))
    return states.zeroed(rates)
