"""The tokens that a run trains on: one micro-batch's tokens, and counts of its labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..definitions.words import plural
from .relation import Relation, Verdict

NAME = "trained tokens"
LABELS, PREDICTED = "labels", "target tokens"
IGNORED = -100
SHOWN = 4096


@dataclass(frozen=True)
class Trained:
    """Counts of a micro-batch for which the trained tokens are known.

    Args:
        padding_trained: padding tokens that have a label.
        without_labels: rows without a label.
        ends: end tokens that are trained, or that follow a trained token.
        begin_twice: rows that begin with two start tokens.
        end_once: rows whose last token with a label is the end token.
        end_twice: those of them in which another end token precedes it, with only white space in between.
        pieces: the texts of the first row, each with its use: "label", "read" or "padding".
        row: the first row's tokens: id, text and use; at most `SHOWN`.
    """

    tokens: int
    labels: int
    padding: int
    padding_trained: int
    rows: int
    without_labels: int
    ends: int
    ends_trained: int
    begin_twice: int
    end_once: int
    end_twice: int
    pieces: tuple[tuple[str, str], ...] = field(default=())
    row: tuple[tuple[int, str, str], ...] = field(default=())
    width: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return the counts and the first row's tokens."""
        counts = {name: value for name, value in vars(self).items() if isinstance(value, int) and name != "width"}
        return {"counts": counts, "row": self.row, "left_out": max(0, self.width - len(self.row))}

    def relation(self) -> Relation:
        real = self.tokens - self.padding
        deviation = f"{self.labels} of {real} tokens ({self.labels / max(1, real):.0%})"
        notes, wrong = [], []
        if self.padding:
            notes.append(plural(self.padding, "padding token", "padding tokens"))
        if self.padding_trained:
            wrong.append(f"{plural(self.padding_trained, 'padding token has', 'padding tokens have')} a label")
        if self.without_labels:
            wrong.append(f"{self.without_labels} of {self.rows} rows have no label")
        if self.ends:
            each = f"{self.ends_trained} of {self.ends} end tokens have a label"
            (wrong if self.ends_trained < self.ends else notes).append(each)
        if self.begin_twice:
            wrong.append(f"{self.begin_twice} of {self.rows} rows begin with the start token twice")
        if self.end_twice:
            wrong.append(f"{self.end_twice} of {self.rows} rows end with two end tokens")
        verdict = Verdict.NOTE if wrong else Verdict.HOLDS
        if self.end_twice and self.end_twice == self.end_once:
            verdict = Verdict.DEVIATES
        return Relation(NAME, verdict, deviation, "; ".join([*notes, *wrong]))


@dataclass(frozen=True)
class _Rows:
    """Token ids, and masks of the trained tokens and of padding; all have the same shape."""

    ids: torch.Tensor
    trained: torch.Tensor
    padded: torch.Tensor


def read(inputs: Any, tokenizer: Any) -> Trained | None:
    """Return the first row's tokens and counts of all rows; None if the micro-batch has neither labels nor masks.

    Args:
        inputs: a micro-batch as the loss receives it: with labels, or with completion masks as in TRL's trainers of
            preferences and rollouts. If ``labels`` and ``input_ids`` differ in shape (an encoder and a decoder), the
            labels are read.
        tokenizer: the trainer's processing class, for texts and for the start and end tokens; may be None.
    """
    rows = _rows_of(inputs) if isinstance(inputs, Mapping) else None
    if rows is None:
        return None
    ids, trained, padded = rows.ids, rows.trained & ~rows.padded, rows.padded
    end, start = (getattr(tokenizer, f"{name}_token_id", None) for name in ("eos", "bos"))
    ends = ((ids == end) & ~padded) if isinstance(end, int) else torch.zeros_like(trained)
    once, twice = _endings(ids, trained, ends, tokenizer)
    answered = trained | torch.nn.functional.pad(trained, (1, 0))[:, :-1]  # excludes the prompt's turns
    ends &= answered
    return Trained(
        tokens=ids.numel(),
        labels=int(trained.sum()),
        padding=int(padded.sum()),
        padding_trained=int((rows.trained & padded).sum()),
        rows=ids.shape[0],
        without_labels=int((~trained.any(1)).sum()),
        ends=int(ends.sum()),
        ends_trained=int((ends & trained).sum()),
        begin_twice=_begin_twice(ids, padded, start) if isinstance(start, int) and start != end else 0,
        end_once=once,
        end_twice=twice,
        pieces=tuple(_pieces(ids[0], trained[0], padded[0], tokenizer)),
        row=tuple(_one_by_one(ids[0][:SHOWN], trained[0], padded[0], tokenizer)),
        width=ids.shape[1],
    )


def _rows_of(inputs: Mapping[str, Any]) -> _Rows | None:
    ids, labels = _tokens(inputs, "input_ids"), _tokens(inputs, "labels")
    if labels is not None:
        if ids is not None and ids.shape == labels.shape:
            return _Rows(ids, labels != IGNORED, _padding(inputs.get("attention_mask"), ids))
        return _Rows(labels.clamp(min=0), labels != IGNORED, labels == IGNORED)
    trained, answers = completion(inputs), _tokens(inputs, "completion_ids")
    if trained is not None and ids is not None and ids.shape == trained.shape:
        return _Rows(ids, trained, _padding(inputs.get("attention_mask"), ids))
    if trained is not None and answers is not None and answers.shape == trained.shape:
        rows = _Rows(answers, trained, inputs["completion_mask"] == 0)
        return _behind(_tokens(inputs, "prompt_ids"), inputs.get("prompt_mask"), rows)
    both = []
    for side in ("chosen", "rejected"):  # TRL before 0.29
        if (tokens := _tokens(inputs, f"{side}_input_ids")) is None:
            return None
        padded = _padding(inputs.get(f"{side}_attention_mask"), tokens)
        prompts = _tokens(inputs, "prompt_input_ids")
        both.append(_behind(prompts, inputs.get("prompt_attention_mask"), _Rows(tokens, ~padded, padded)))
    return _below(*both)


def _tokens(inputs: Mapping[str, Any], name: str) -> torch.Tensor | None:
    value = inputs.get(name)
    return value if isinstance(value, torch.Tensor) and value.dim() == 2 and not value.is_floating_point() else None


def _padding(mask: Any, ids: torch.Tensor) -> torch.Tensor:
    known = isinstance(mask, torch.Tensor) and mask.shape == ids.shape
    return mask == 0 if known else torch.zeros_like(ids, dtype=torch.bool)


def _behind(prompts: torch.Tensor | None, mask: Any, rows: _Rows) -> _Rows:
    """Put the prompts before the completions, if the prompts are known."""
    if prompts is None or len(prompts) != len(rows.ids):
        return rows
    none = torch.zeros_like(prompts, dtype=torch.bool)
    parts = (prompts, rows.ids), (none, rows.trained), (_padding(mask, prompts), rows.padded)
    return _Rows(*(torch.cat(each, 1) for each in parts))


def _below(one: _Rows, other: _Rows) -> _Rows:
    width = max(one.ids.shape[1], other.ids.shape[1])

    def wide(values: torch.Tensor, by: int | bool) -> torch.Tensor:
        return torch.nn.functional.pad(values, (0, width - values.shape[1]), value=by)

    both = (one, other)
    return _Rows(
        torch.cat([wide(each.ids, 0) for each in both]),
        torch.cat([wide(each.trained, False) for each in both]),
        torch.cat([wide(each.padded, True) for each in both]),
    )


def _endings(ids: torch.Tensor, trained: torch.Tensor, ends: torch.Tensor, tokenizer: Any) -> tuple[int, int]:
    """Count the rows whose last trained token is the end token, and those in which another one precedes it."""
    once = twice = 0
    for row, of_row, at_end in zip(ids, trained, ends, strict=True):
        places = of_row.nonzero()[:, 0].tolist()
        if not places or not at_end[places[-1]]:
            continue
        once += 1
        before = places[:-1]
        if before and not at_end[before[-1]] and not _text([int(row[before[-1]])], tokenizer).strip():
            before.pop()  # "<|im_end|>\n<|im_end|>"
        twice += bool(before and at_end[before[-1]])
    return once, twice


def _begin_twice(ids: torch.Tensor, padded: torch.Tensor, start: int) -> int:
    twice = 0
    for row, no_token in zip(ids, padded, strict=True):
        real = row[~no_token][:2].tolist()
        twice += real == [start, start]
    return twice


def counts(inputs: Any) -> dict[str, float]:
    """Return the possible weights of a micro-batch by name: numbers of labels, tokens and rows."""
    if not isinstance(inputs, Mapping):
        return {}
    numbers: dict[str, float] = {}
    given = inputs.get("labels")
    if isinstance(given, torch.Tensor) and given.dim() and not given.is_floating_point():
        numbers[LABELS] = float((given != IGNORED).sum())
        if given.dim() > 1:
            numbers[PREDICTED] = float((given[..., 1:] != IGNORED).sum())
    if isinstance(each := inputs.get("shift_labels"), torch.Tensor):
        numbers["shift_labels"] = float((each != IGNORED).sum())
    if (completions := completion(inputs)) is not None:
        numbers["completion tokens"] = float(completions.sum())
    rows = next((each.shape[0] for each in inputs.values() if isinstance(each, torch.Tensor) and each.dim()), None)
    if rows is not None:
        numbers["rows"] = float(rows)
    return numbers


def completion(inputs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the mask of trained completion tokens, without tool outputs; None if there is no completion mask."""
    mask, of_tools = inputs.get("completion_mask"), inputs.get("tool_mask")
    if not isinstance(mask, torch.Tensor):
        return None
    return (mask != 0) & (of_tools != 0) if isinstance(of_tools, torch.Tensor) else mask != 0


def counts_of(inputs: Sequence[Any]) -> dict[str, list[float]]:
    """Return `counts` of several micro-batches: the names of the first one, without those that are 0 in all."""
    counted = [counts(each) for each in inputs]
    by_name = {name: [each.get(name, 0.0) for each in counted] for name in sorted(counted[0])}
    return {name: numbers for name, numbers in by_name.items() if any(numbers)}


def _pieces(ids: torch.Tensor, trained: torch.Tensor, padded: torch.Tensor, tokenizer: Any) -> list[tuple[str, str]]:
    kinds = _kinds(trained, padded)
    spans: list[tuple[list[int], str]] = []
    for number, kind in zip(ids.tolist(), kinds, strict=True):
        if not spans or spans[-1][1] != kind:
            spans.append(([], kind))
        spans[-1][0].append(number)
    return [(_text(numbers, tokenizer), kind) for numbers, kind in spans]


def _kinds(trained: torch.Tensor, padded: torch.Tensor) -> list[str]:
    return ["padding" if pad else "label" if label else "read" for pad, label in zip(padded, trained, strict=True)]


def _one_by_one(
    ids: torch.Tensor, trained: torch.Tensor, padded: torch.Tensor, tokenizer: Any
) -> Iterator[tuple[int, str, str]]:
    for number, kind in zip(ids.tolist(), _kinds(trained, padded), strict=False):
        yield number, _text([number], tokenizer), kind


def _text(numbers: list[int], tokenizer: Any) -> str:
    try:
        return str(tokenizer.decode(numbers))
    except Exception:  # no tokenizer, or another kind of processor
        return " ".join(map(str, numbers))
