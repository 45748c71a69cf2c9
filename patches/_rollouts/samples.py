"""Checks of completions by themselves, as lists of token ids in the host's memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

_LEAST_ROWS = 4
"""Fewer completions can be equal by chance."""


def of_rows(value: object, kind: type) -> bool:
    """Whether the value is a list of rows, each a list of numbers of one kind; checks the first number only."""
    if not isinstance(value, list) or not all(isinstance(row, (list, tuple)) for row in value):
        return False
    return isinstance(next((each for row in value for each in row), None), kind)


def surprise_of_equals(
    groups: Sequence[Hashable],
    completions: Sequence[Sequence[int]],
    log_probabilities: Sequence[Sequence[float | None]],
) -> float:
    """How unlikely it is that all completions of a group are equal: -log of the chance, in nats.

    Each further completion equals the first one with the first one's own probability p. Of many groups, some are equal
    by chance: the probability that n groups reach a sum s is below 2^n e^-s, since the mean of 1/p where a group is
    equal, and of 1 where it is not, is below 2.

    Args:
        groups: for each row, the key of its group: the prompt.
        completions: for each row, the tokens.
        log_probabilities: for each row, its tokens' log-probabilities under the distribution they were sampled from.

    Returns:
        The sum over the groups of at least two rows whose completions are all equal, less ln 2 for each group of at
        least two rows; at least 0.
    """
    rows: dict[Hashable, list[int]] = {}
    for row, group in enumerate(groups):
        rows.setdefault(group, []).append(row)
    total = 0.0
    for members in rows.values():
        first = members[0]
        if len(members) < 2:
            continue
        total -= math.log(2)
        if any(list(completions[row]) != list(completions[first]) for row in members[1:]):
            continue
        known = [value for value in log_probabilities[first] if value is not None and math.isfinite(value)]
        total -= (len(members) - 1) * sum(known)
    return max(total, 0.0)


def without_padding(prompts: Sequence[Sequence[int]], pad: int | None) -> list[list[int]]:
    """Removes the padding from prompts that were padded on the left."""
    return [list(itertools.dropwhile(lambda token: token == pad, prompt)) for prompt in prompts]


def reach(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> int:
    """The maximum number of tokens of a prompt and its completion; 0 without rows."""
    return max((len(prompt) + len(tokens) for prompt, tokens in zip(prompts, completions, strict=True)), default=0)


def share_of_single_tokens(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], ends: Collection[int | None], context: int
) -> float:
    """The share of completions with one token, if at least one of these should have continued; 0 for a few rows.

    A completion should not continue if its token ends a text, or if the context may have been full.

    Args:
        prompts: for each row, the tokens.
        completions: for each row, the tokens.
        ends: tokens that end a text.
        context: a number of tokens that fits into the engine's context: the `reach` of this run so far.
    """
    rows = [(prompt, tokens) for prompt, tokens in zip(prompts, completions, strict=True) if len(tokens) == 1]
    short = [tokens for prompt, tokens in rows if tokens[0] not in ends and len(prompt) + 1 < context]
    if len(completions) < _LEAST_ROWS or not short:
        return 0.0
    return len(rows) / len(completions)


def ends_of(model: Any, *others: int | None) -> set[int | None]:
    """The tokens that end a text: those that a model's configurations name, and ``others``."""
    found = set(others)
    for each in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        named = getattr(each, "eos_token_id", None)
        found |= set(named) if isinstance(named, (list, tuple)) else {named}
    return found


def of_other_prompts(given: Sequence[Sequence[int]], answered: Sequence[Sequence[int]]) -> int:
    """The number of rows for which the engine received another prompt than the row's own, or none."""
    pairs = zip(given, answered, strict=False)
    return abs(len(given) - len(answered)) + sum(list(one) != list(other) for one, other in pairs)


def beyond(completions: Sequence[Sequence[int]], limit: int) -> int:
    """The number of tokens by which the longest completion exceeds the limit; 0 if none does."""
    return max([0, *(len(tokens) - limit for tokens in completions)])


_WHOLE: Mapping[str, Collection[object]] = {
    "top_p": (1, None),
    "top_k": (0, -1, None),
    "min_p": (0, None),
    "repetition_penalty": (1, None),
}
SAMPLING = ("temperature", *_WHOLE)
"""The settings that determine the sampling distribution."""


def is_whole(sampling: Mapping[str, object]) -> bool:
    """Whether tokens are sampled from the whole vocabulary without penalties, at any temperature."""
    return all(sampling.get(name) in values for name, values in _WHOLE.items())


def is_plain(sampling: Mapping[str, object]) -> bool:
    """Whether tokens are sampled from the model's own distribution: temperature 1, no truncation, no penalties.

    Only then are the engine's log-probabilities certainly those of the sampling distribution.
    """
    return sampling.get("temperature") == 1 and is_whole(sampling)
