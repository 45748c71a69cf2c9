"""What to do about an exception that is no known bug, if its text tells."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from .tracebacks import Event, Raised

_MOST = 8
_KEYWORD = re.compile(r"(\w{1,99}\.\w{1,99})\(\) got an unexpected keyword argument '(\w{1,99})'$")
_POSITIONAL = re.compile(r"(\w{1,99}\.\w{1,99})\(\) takes \d{1,3} positional arguments? but \d{1,3} were given$")


class Hints:
    """The hints for a log's exceptions, by their texts."""

    def __init__(self) -> None:
        self._by_text: dict[str, str] = {}

    def observed(self, log: Iterable[Event]) -> Iterator[Event]:
        """The same events."""
        for event in log:
            if isinstance(event, Raised) and event.exception == "TypeError" and len(self._by_text) < _MOST:
                text = hint(event.message)
                if text:
                    self._by_text[event.message] = text
            yield event

    def of_others(self, explained: Iterable[str]) -> list[str]:
        """The hints for exceptions with other texts than these."""
        left = [text for message, text in self._by_text.items() if message not in set(explained)]
        return list(dict.fromkeys(left))


def hint(message: str) -> str:
    """What to do about a TypeError; empty if its text does not tell."""
    match = _KEYWORD.match(message)
    if match:
        return (
            f"{match[1]}() lacks the parameter {match[2]!r} that its caller passes. If the class is yours, add "
            f"`{match[2]}=None`."
        )
    match = _POSITIONAL.match(message)
    if match:
        return (
            f"{match[1]}() takes fewer arguments than its caller passes. If the class is yours, give the method the "
            "parameters of the base class's."
        )
    return ""
