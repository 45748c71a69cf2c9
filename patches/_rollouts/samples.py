"""What can be said of completions by themselves, as lists of token ids in the host's memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

_LEAST_ROWS = 4
"""Fewer completions can be alike by chance."""


def of_rows(value: object, kind: type) -> bool:
    """Whether it is a list with a list for each row, of numbers of a kind; by the first number that there is."""
    if not isinstance(value, list) or not all(isinstance(row, (list, tuple)) for row in value):
        return False
    return isinstance(next((each for row in value for each in row), None), kind)


def surprise_of_equals(
    groups: Sequence[Hashable],
    completions: Sequence[Sequence[int]],
    log_probabilities: Sequence[Sequence[float | None]],
) -> float:
    """How unlikely it is that groups have nothing but equal completions: -log of the chance, in nats.

    Each further completion equals the first one with the chance that the first one has.

    Args:
        groups: of each row, what its group has in common: the prompt.
        completions: of each row the tokens.
        log_probabilities: of each row those of its tokens, under the distribution that they were sampled from.

    Returns:
        the sum over the groups of two rows or more all of whose completions are equal; 0 where there is none.
    """
    rows: dict[Hashable, list[int]] = {}
    for row, group in enumerate(groups):
        rows.setdefault(group, []).append(row)
    total = 0.0
    for members in rows.values():
        first = members[0]
        if len(members) < 2 or any(list(completions[row]) != list(completions[first]) for row in members[1:]):
            continue
        known = [value for value in log_probabilities[first] if value is not None and math.isfinite(value)]
        total -= (len(members) - 1) * sum(known)
    return total


def without_padding(prompts: Sequence[Sequence[int]], pad: int | None) -> list[list[int]]:
    """Prompts that were padded on the left."""
    return [list(itertools.dropwhile(lambda token: token == pad, prompt)) for prompt in prompts]


def reach(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> int:
    """The most tokens that a prompt has together with its completion; 0 of no rows."""
    return max((len(prompt) + len(tokens) for prompt, tokens in zip(prompts, completions, strict=True)), default=0)


def share_of_single_tokens(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], ends: Collection[int | None], context: int
) -> float:
    """The share of completions that are one token, where one of these should have gone on; 0 of a few rows.

    One that is an end should not, nor one with which the context may have been full.

    Args:
        prompts: of each row the tokens.
        completions: of each row the tokens.
        ends: tokens that end a text.
        context: so many tokens are known to fit into the engine's context: the `reach` of this run so far.
    """
    rows = [(prompt, tokens) for prompt, tokens in zip(prompts, completions, strict=True) if len(tokens) == 1]
    short = [tokens for prompt, tokens in rows if tokens[0] not in ends and len(prompt) + 1 < context]
    if len(completions) < _LEAST_ROWS or not short:
        return 0.0
    return len(rows) / len(completions)


def ends_of(model: Any, *others: int | None) -> set[int | None]:
    """The tokens with which a text ends: those that a model's configurations name, and others that are known."""
    found = set(others)
    for each in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        named = getattr(each, "eos_token_id", None)
        found |= set(named) if isinstance(named, (list, tuple)) else {named}
    return found


def of_other_prompts(given: Sequence[Sequence[int]], answered: Sequence[Sequence[int]]) -> int:
    """Of how many rows the engine was given something else than the row's own prompt, or nothing."""
    pairs = zip(given, answered, strict=False)
    return abs(len(given) - len(answered)) + sum(list(one) != list(other) for one, other in pairs)


def beyond(completions: Sequence[Sequence[int]], limit: int) -> int:
    """By how many tokens the longest completion is longer than the limit; 0 where none is."""
    return max([0, *(len(tokens) - limit for tokens in completions)])


_WHOLE: Mapping[str, Collection[object]] = {
    "top_p": (1, None),
    "top_k": (0, -1, None),
    "min_p": (0, None),
    "repetition_penalty": (1, None),
}
SAMPLING = ("temperature", *_WHOLE)
"""The settings that decide from which distribution tokens are sampled."""


def is_whole(sampling: Mapping[str, object]) -> bool:
    """Whether tokens are sampled from all of the vocabulary, and none is penalised, whatever the temperature."""
    return all(sampling.get(name) in values for name, values in _WHOLE.items())


def is_plain(sampling: Mapping[str, object]) -> bool:
    """Whether tokens are sampled from the model's own distribution: temperature 1, and nothing cut off or penalised.

    Only of such is it sure that the engine's log-probabilities are those of the distribution sampled from.
    """
    return sampling.get("temperature") == 1 and is_whole(sampling)
