"""A log line that is a JSON object: the lines of text in its fields."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

BEGIN = "Traceback (most recent call last):"
LONGEST = 1 << 18  # bytes of such a line; the parsed object takes some twenty times as much
_TEXTS = ("log", "message", "msg", "event")  # fields in which log collectors put a line of text
_RANKS = ("rank", "global_rank")
_DEEPEST = 8


def unfolded(line: str) -> tuple[str, list[str]] | None:
    """The rank that an object names, as a prefix, and the lines of its fields; None if the line is not an object.

    The lines are those of every field with a traceback; without one, those of the field for the log's text.
    """
    try:
        # As text: a number of a million digits takes a minute.
        fields = json.loads(line, parse_int=str, parse_float=str, parse_constant=str, strict=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    rank = next((fields[name] for name in _RANKS if name in fields), "")
    prefix = f"[rank{rank}]" if isinstance(rank, str) and rank.isdecimal() and len(rank) < 10 else ""
    # A traceback in two fields, for example message and exception, was raised once.
    tracebacks = {text[text.index(BEGIN) :].strip(): text for text in _strings(fields, 0) if BEGIN in text}
    texts = list(tracebacks.values()) or [fields[name] for name in _TEXTS if isinstance(fields.get(name), str)][:1]
    return prefix, [each for text in texts for each in text.split("\n")]


def _strings(value: Any, depth: int) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)) and depth < _DEEPEST:
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each, depth + 1)
