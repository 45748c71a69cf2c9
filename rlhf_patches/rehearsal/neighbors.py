"""Independent rows and documents: other tokens in one of them leave the log-probabilities of the others as they are."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from . import pieces, window
from .relation import Relation, Verdict

ROWS, DOCUMENTS = "independent rows", "independent documents"
_READ = ("input_ids", "attention_mask", "position_ids", "token_type_ids")
_OF_DECODERS = ("labels", "decoder_input_ids", "decoder_attention_mask")
_MOST = 8
_FINE = 1e-5


@dataclass(frozen=True)
class Changed:
    """A model's inputs, and the same with other tokens in every second row or document.

    Args:
        name: the relation's name.
        inputs: what the model is given.
        other: the same with other tokens.
        mine: the positions of the rows or documents that keep their tokens.
        why: why nothing can be changed; empty if it can.
    """

    name: str = ROWS
    inputs: Mapping[str, Any] | None = None
    other: Mapping[str, Any] | None = None
    mine: torch.Tensor | None = None
    why: str = ""


def changed(inputs: Any, model: torch.nn.Module) -> Changed:
    """Reverse the tokens of every second row or document, and replace each by the next larger one that occurs.

    Args:
        inputs: the loss's inputs, with ``input_ids``, or with ``prompt_ids`` and ``completion_ids``.
        model: the model without wrappers of parallelism.
    """
    if not isinstance(inputs, Mapping):
        return Changed(why=f"the micro-batch is a {type(inputs).__name__}, not a mapping")
    given = _joined({name: value for name, value in inputs.items() if value is not None})
    ids = given.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return Changed(why="the micro-batch has no input_ids")
    config = getattr(pieces.base(model), "config", None)
    taken = (*_READ, *(_OF_DECODERS if getattr(config, "is_encoder_decoder", False) else ()))
    named = inspect.signature(pieces.base(model).forward).parameters
    if others := sorted({*given} & {*named} - {*taken, "labels"}):
        return Changed(why=f"{others[0]} is not known to have one entry per row")
    kept = {name: given[name] for name in taken if name in given}
    if any(not isinstance(each, torch.Tensor) or len(each) != len(ids) for each in kept.values()):
        return Changed(why="the inputs differ in their number of rows")
    rows: dict[str, Any] = {name: each[:_MOST] for name, each in kept.items()}
    if "use_cache" in named:
        rows["use_cache"] = False  # with a cache, as outside of training, models do not tell documents apart
    return _replaced(rows)


def _joined(given: dict[str, Any]) -> dict[str, Any]:
    """Return a model's inputs for rollouts: prompts and completions in one row."""
    parts = [given.get(name) for name in ("prompt_ids", "completion_ids", "prompt_mask", "completion_mask")]
    if "input_ids" in given or not all(isinstance(each, torch.Tensor) and each.dim() == 2 for each in parts):
        return given
    ids, mask = (torch.cat(both, 1) for both in (parts[:2], parts[2:]))
    rest = {name: value for name, value in given.items() if not name.startswith(("prompt_", "completion_"))}
    return {**rest, "input_ids": ids, "attention_mask": mask}


def _replaced(kept: dict[str, Any]) -> Changed:
    ids, mask, positions = kept["input_ids"], kept.get("attention_mask"), kept.get("position_ids")
    real = mask != 0 if mask is not None and mask.shape == ids.shape else torch.ones_like(ids, dtype=torch.bool)
    other, mine = ids.clone(), torch.zeros_like(real)
    number, several = 0, False
    occur = ids[real].unique()
    for row in range(len(ids)):
        starts = pieces.starts(positions[row : row + 1]) if positions is not None and positions.dim() == 2 else [0]
        several |= len(starts or ()) > 1
        for start, end in zip(starts or [0], [*(starts or [0])[1:], ids.shape[1]], strict=True):
            places = start + real[row, start:end].nonzero()[:, 0]
            if number % 2:
                mine[row, places] = True
            else:
                which = torch.searchsorted(occur, ids[row, places.flip(0)])
                other[row, places] = occur[(which + 1) % len(occur)]
            number += bool(len(places))
    name = DOCUMENTS if several else ROWS
    if number < 2:
        return Changed(name, why="the micro-batch has one row")
    if torch.equal(other, ids):
        return Changed(name, why="all tokens are equal")
    return Changed(name, kept, {**kept, "input_ids": other}, mine)


def unknown(model: torch.nn.Module, noise: float) -> str:
    """Return why rows may affect each other by design; empty if they may not."""
    if not pieces.kind(model).__module__.startswith("transformers."):
        return f"{pieces.kind(model).__name__} is not a model of transformers"
    if why := pieces.normalizes(model):
        return why
    settings = vars(getattr(pieces.base(model), "config", None) or object.__new__(torch.nn.Module)).items()
    experts = [value for name, value in settings if "expert" in name and isinstance(value, int)]
    if any("capacity" in name for name, _ in settings):
        return "an expert's capacity is shared by all rows"
    if any(each > 1 for each in experts) and noise > _FINE:
        return "rounding may send a token to another expert"
    return ""


def scores(logits: torch.Tensor, ids: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of the next tokens at ``mine``; of all classes of rows that have some.

    Args:
        logits: batch x tokens x vocabulary, or batch x classes, or batch x other tokens x vocabulary.
        ids: batch x tokens.
        mine: of the shape of ``ids``.
    """
    found = []
    for row, each in enumerate(logits):
        if not bool(mine[row].any()):
            continue
        if logits.dim() == 3 and logits.shape[1] >= ids.shape[1]:
            ours = each[-ids.shape[1] :][mine[row]].float().log_softmax(-1)  # virtual tokens come first
            wanted = ids[row].roll(-1)[mine[row]]
            of_tokens = ours.shape[1] > int(ids.max())
            found.append(ours.gather(-1, wanted[:, None])[:, 0] if of_tokens else ours.reshape(-1))
        else:
            found.append(each.float().reshape(-1))
    return torch.cat(found).double().cpu()


def judge(name: str, before: torch.Tensor, after: torch.Tensor, noise: float) -> Relation:
    """Compare the log-probabilities with those beside other tokens."""
    apart = float((after - before).norm()) / (float(before.norm()) or 1.0)
    if apart <= window.limit(noise):
        return Relation(name, Verdict.HOLDS, f"{apart:.0e}")
    what = "another row's tokens change a row" if name == ROWS else "another document's tokens change a document"
    return Relation(name, Verdict.DEVIATES, f"{apart:.2g}", f"relative error of the log-probabilities: {what}")
