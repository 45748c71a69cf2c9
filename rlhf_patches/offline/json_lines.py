"""A log's line that is an object of JSON: the lines of text in its fields."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

BEGIN = "Traceback (most recent call last):"
LONGEST = 1 << 18  # bytes of such a line; what is parsed takes some twenty times as much
_TEXTS = ("log", "message", "msg", "event")  # where a collector of logs has put a line of text
_RANKS = ("rank", "global_rank")
_DEEPEST = 8


def unfolded(line: str) -> tuple[str, list[str]] | None:
    """The rank that an object names, as a prefix, and the lines of its fields; None where the line is no object.

    They are those of each field with a traceback in it, whatever its name; where none has one, those of the field for
    the text of the log.
    """
    try:
        # As text: a number of a million digits takes a minute.
        found = json.loads(line, parse_int=str, parse_float=str, parse_constant=str, strict=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    rank = next((found[name] for name in _RANKS if name in found), "")
    prefix = f"[rank{rank}]" if isinstance(rank, str) and rank.isdecimal() and len(rank) < 10 else ""
    # What is in two fields, the message and the exception, say, was raised once.
    tracebacks = {text[text.index(BEGIN) :].strip(): text for text in _strings(found, 0) if BEGIN in text}
    texts = list(tracebacks.values()) or [found[name] for name in _TEXTS if isinstance(found.get(name), str)][:1]
    return prefix, [each for text in texts for each in text.split("\n")]


def _strings(value: Any, depth: int) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)) and depth < _DEEPEST:
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each, depth + 1)
