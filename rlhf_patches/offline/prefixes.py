"""What launchers and log collectors put before each line of a traceback.

A few shapes are known. Any other is learned from the log: what stands before the first line of a traceback, or before
a frame, is a prefix wherever a line begins with it. Its numbers may differ, so that times and ranks fit.
"""

from __future__ import annotations

import re

from .json_lines import BEGIN

_MOST = 32  # learned shapes of a log
_LONGEST = 120
# torchrun's [rank0]: and [default0]:, Ray's (Actor pid=1, ip=...), srun -l's 0:, vLLM's ERROR 01-02 [core.py:1], and
# pytest's E
_KNOWN = re.compile(
    r"(?:\[(?:rank|default|[\w.-]{1,99}/)?\d{1,9}\]:?|\([^()\n]{0,199}?\bpid=\d{1,20}\b[^()\n]{0,99}\)|\d{1,9}:"
    r"|(?:ERROR|WARNING|INFO)\s[^\]\n]{0,199}\]|E {3,20})[ ]?"
)
_BEFORE_FRAME = re.compile(rf'(.{{1,{_LONGEST}}}?)  File "[^"\n]{{1,4000}}", line \d{{1,9}}, in ')
_TRACEBACKS_OWN = re.compile(r"[\s|+-]*(?:Exception Group )?$")  # what an ExceptionGroup is indented with
_TIME = re.compile(
    r"\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}:\d{2}(?:[.,]\d{1,9})?(?:Z|[+-]\d{2}:?\d{2})?"
    r"|\d{4}[-/]\d{2}[-/]\d{2}|\d{1,2}:\d{2}:\d{2}(?:[.,]\d{1,9})?|\b\d{10}\.\d{1,9}"
)
_NUMBER = re.compile(r"\d{1,20}")


class Prefixes:
    """The prefixes of a log's lines."""

    def __init__(self) -> None:
        self._learned: dict[str, re.Pattern[str]] = {}

    def split(self, text: str) -> tuple[str, str, str]:
        """The prefixes of a line without their times; those of the known shapes; and the rest of the line."""
        end = self._end(text)
        before = self._unknown(text[end:])
        if before:
            self._learn(before)
            end = self._end(text)
        if not end:
            return "", "", text
        return _named(text[:end]), _named(text[: self._end(text, learned=False)]), text[end:]

    def _end(self, text: str, learned: bool = True) -> int:
        end = 0
        while match := _KNOWN.match(text, end) or (self._match(text, end) if learned else None):
            end = match.end()
        return end

    def _match(self, text: str, start: int) -> re.Match[str] | None:
        return next((match for each in self._learned.values() if (match := each.match(text, start))), None)

    def _unknown(self, text: str) -> str:
        """What stands before a traceback's first line or a frame, if it may be a prefix."""
        if text.endswith(BEGIN):
            before = text[: -len(BEGIN)]
        elif 'File "' in text and (match := _BEFORE_FRAME.match(text)):
            before = match[1]
        else:
            return ""
        return "" if len(before) > _LONGEST or _TRACEBACKS_OWN.match(before) else before

    def _learn(self, before: str) -> None:
        shape = r"\d{1,20}".join(map(re.escape, _NUMBER.split(before)))
        if len(self._learned) < _MOST:
            self._learned.setdefault(shape, re.compile(shape))


def _named(prefix: str) -> str:
    return _TIME.sub("", prefix).strip()
