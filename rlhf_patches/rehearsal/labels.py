"""What a run is trained on: one micro-batch's tokens, and what is counted of its labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .relation import Relation, Verdict

NAME = "what is trained on"
LABELS, PREDICTED = "its labels", "the tokens that are predicted"
_IGNORED = -100


@dataclass(frozen=True)
class Trained:
    """Of a micro-batch whose inputs have ``input_ids`` and ``labels`` of one shape.

    Args:
        pieces: of its first row: texts, each with what becomes of it: "label", "read" or "padding".
    """

    tokens: int
    labels: int
    padding: int
    rows: int
    without_labels: int
    ends: int
    ends_trained: int
    pieces: tuple[tuple[str, str], ...] = field(default=())

    def relation(self) -> Relation:
        real = self.tokens - self.padding
        deviation = f"{self.labels} of {real} tokens ({self.labels / max(1, real):.0%})"
        said = []
        if self.padding:
            said.append(f"{self.padding} more are padding")
        if self.without_labels:
            said.append(f"{self.without_labels} of {self.rows} rows have no label at all")
        if self.ends:
            said.append(f"{self.ends_trained} of {self.ends} end tokens have a label")
        wrong = self.without_labels or self.ends_trained < self.ends
        return Relation(NAME, Verdict.NOTE if wrong else Verdict.HOLDS, deviation, "; ".join(said))


def read(inputs: Any, tokenizer: Any) -> Trained | None:
    """What the first row's tokens are, and counts of all rows; None where a micro-batch has no labels of tokens.

    Args:
        inputs: a micro-batch as the loss gets it. Where ``labels`` have another shape than ``input_ids`` (an encoder
            and a decoder), they are what is read.
        tokenizer: the trainer's processing class, for texts and the end token; may be None.
    """
    if not isinstance(inputs, Mapping):
        return None
    ids, labels = inputs.get("input_ids"), inputs.get("labels")
    if not (isinstance(labels, torch.Tensor) and labels.dim() == 2 and not labels.is_floating_point()):
        return None
    trained = labels != _IGNORED
    if isinstance(ids, torch.Tensor) and ids.shape == labels.shape:
        mask = inputs.get("attention_mask")
        whole = isinstance(mask, torch.Tensor) and mask.shape == ids.shape
        padded = (mask == 0) if isinstance(mask, torch.Tensor) and whole else torch.zeros_like(trained)
    else:
        ids, padded = labels.clamp(min=0), ~trained
    end = getattr(tokenizer, "eos_token_id", None)
    ends = ((ids == end) & ~padded) if isinstance(end, int) else torch.zeros_like(trained)
    return Trained(
        tokens=ids.numel(),
        labels=int(trained.sum()),
        padding=int(padded.sum()),
        rows=ids.shape[0],
        without_labels=int((~trained.any(1)).sum()),
        ends=int(ends.sum()),
        ends_trained=int((ends & trained).sum()),
        pieces=tuple(_pieces(ids[0], trained[0], padded[0], tokenizer)),
    )


def counts(inputs: Any) -> dict[str, float]:
    """What a micro-batch may be weighted by: numbers of its labels and of its rows, by what they are."""
    if not isinstance(inputs, Mapping):
        return {}
    found: dict[str, float] = {}
    given = inputs.get("labels")
    if isinstance(given, torch.Tensor) and given.dim() and not given.is_floating_point():
        found[LABELS] = float((given != _IGNORED).sum())
        if given.dim() > 1:
            found[PREDICTED] = float((given[..., 1:] != _IGNORED).sum())
    for name in ("shift_labels", "completion_mask"):
        if isinstance(each := inputs.get(name), torch.Tensor):
            found[f"its {name}"] = float((each != (_IGNORED if name == "shift_labels" else 0)).sum())
    rows = next((each.shape[0] for each in inputs.values() if isinstance(each, torch.Tensor) and each.dim()), None)
    if rows is not None:
        found["its rows"] = float(rows)
    return found


def counts_of(inputs: Sequence[Any]) -> dict[str, list[float]]:
    """The same of several micro-batches, one number each, of what the first one has and not all have none of."""
    counted = [counts(each) for each in inputs]
    by_name = {name: [each.get(name, 0.0) for each in counted] for name in sorted(counted[0])}
    return {name: numbers for name, numbers in by_name.items() if any(numbers)}


def _pieces(ids: torch.Tensor, trained: torch.Tensor, padded: torch.Tensor, tokenizer: Any) -> list[tuple[str, str]]:
    kinds = ["padding" if pad else "label" if label else "read" for pad, label in zip(padded, trained, strict=True)]
    found: list[tuple[list[int], str]] = []
    for number, kind in zip(ids.tolist(), kinds, strict=True):
        if not found or found[-1][1] != kind:
            found.append(([], kind))
        found[-1][0].append(number)
    return [(_text(numbers, tokenizer), kind) for numbers, kind in found]


def _text(numbers: list[int], tokenizer: Any) -> str:
    try:
        return str(tokenizer.decode(numbers))
    except Exception:  # there is no tokenizer, or it is one of another kind
        return " ".join(map(str, numbers))
