"""What a run is trained on: one micro-batch's tokens, and what is counted of its labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .relation import Relation, Verdict

NAME = "what is trained on"
LABELS, PREDICTED = "its labels", "the tokens that are predicted"
IGNORED = -100


@dataclass(frozen=True)
class Trained:
    """Of a micro-batch whose tokens are known to be trained on or not.

    Args:
        padding_trained: padding that has a label.
        without_labels: rows.
        ends: end tokens that are trained, or follow what is.
        begin_twice: rows.
        end_once: rows whose last token with a label is the end token.
        end_twice: of these those where another end token stands before it, with nothing but white space between.
        pieces: of its first row: texts, each with what becomes of it: "label", "read" or "padding".
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

    def relation(self) -> Relation:
        real = self.tokens - self.padding
        deviation = f"{self.labels} of {real} tokens ({self.labels / max(1, real):.0%})"
        said, wrong = [], []
        if self.padding:
            said.append(f"{self.padding} more are padding")
        if self.padding_trained:
            wrong.append(f"{self.padding_trained} tokens of padding have a label")
        if self.without_labels:
            wrong.append(f"{self.without_labels} of {self.rows} rows have no label at all")
        if self.ends:
            each = f"{self.ends_trained} of {self.ends} end tokens have a label"
            (wrong if self.ends_trained < self.ends else said).append(each)
        if self.begin_twice:
            wrong.append(f"{self.begin_twice} of {self.rows} rows begin with the start token twice")
        if self.end_twice:
            wrong.append(f"{self.end_twice} of {self.rows} rows end twice")
        verdict = Verdict.NOTE if wrong else Verdict.HOLDS
        if self.end_twice and self.end_twice == self.end_once:
            verdict = Verdict.DEVIATES
        return Relation(NAME, verdict, deviation, "; ".join([*said, *wrong]))


@dataclass(frozen=True)
class _Rows:
    """Tokens; which of them are trained on, and which are padding. One shape each."""

    ids: torch.Tensor
    trained: torch.Tensor
    padded: torch.Tensor


def read(inputs: Any, tokenizer: Any) -> Trained | None:
    """What the first row's tokens are, and counts of all rows; None where a micro-batch does not say what is trained.

    Args:
        inputs: a micro-batch as the loss gets it: with labels; or, as TRL's trainers of preferences and rollouts
            have it, with masks of completions. Where ``labels`` have another shape than ``input_ids`` (an encoder and
            a decoder), they are what is read.
        tokenizer: the trainer's processing class, for texts, the start and the end token; may be None.
    """
    rows = _rows_of(inputs) if isinstance(inputs, Mapping) else None
    if rows is None:
        return None
    ids, trained, padded = rows.ids, rows.trained & ~rows.padded, rows.padded
    end, start = (getattr(tokenizer, f"{name}_token_id", None) for name in ("eos", "bos"))
    ends = ((ids == end) & ~padded) if isinstance(end, int) else torch.zeros_like(trained)
    once, twice = _endings(ids, trained, ends, tokenizer)
    answered = trained | torch.nn.functional.pad(trained, (1, 0))[:, :-1]  # not of a prompt's turns
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
    """Answers behind their prompts, where these are known."""
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
    """How many rows' last trained token is the end token, and in how many another one stands before it."""
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
    found = 0
    for row, no_token in zip(ids, padded, strict=True):
        real = row[~no_token][:2].tolist()
        found += real == [start, start]
    return found


def counts(inputs: Any) -> dict[str, float]:
    """What a micro-batch may be weighted by: numbers of its labels and of its rows, by what they are."""
    if not isinstance(inputs, Mapping):
        return {}
    found: dict[str, float] = {}
    given = inputs.get("labels")
    if isinstance(given, torch.Tensor) and given.dim() and not given.is_floating_point():
        found[LABELS] = float((given != IGNORED).sum())
        if given.dim() > 1:
            found[PREDICTED] = float((given[..., 1:] != IGNORED).sum())
    if isinstance(each := inputs.get("shift_labels"), torch.Tensor):
        found["its shift_labels"] = float((each != IGNORED).sum())
    if (completions := completion(inputs)) is not None:
        found["its completions' tokens"] = float(completions.sum())
    rows = next((each.shape[0] for each in inputs.values() if isinstance(each, torch.Tensor) and each.dim()), None)
    if rows is not None:
        found["its rows"] = float(rows)
    return found


def completion(inputs: Mapping[str, Any]) -> torch.Tensor | None:
    """Which tokens of a micro-batch's completions are trained on: not a tool's; None where it has no mask of them."""
    mask, of_tools = inputs.get("completion_mask"), inputs.get("tool_mask")
    if not isinstance(mask, torch.Tensor):
        return None
    return (mask != 0) & (of_tools != 0) if isinstance(of_tools, torch.Tensor) else mask != 0


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
