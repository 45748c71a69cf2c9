"""The versions that a log names: a banner's, pip's, those of an issue's system information."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

MOST_LINES = 5000
"""The number of a log's first lines in which versions are looked for."""

_NEEDLE = re.compile(rb"\d\.\d{1,6}\.\d")
_VERSION = re.compile(
    r"(?<![\w./@-])([A-Za-z][A-Za-z_-]{1,40}?)[`'\"*]{0,3}(?:[ _-][Vv]ersion)?"
    r"(?:==|-|[`'\"* ]{0,30}[:=]?[`'\"* ]{0,30}v?)"
    r"(\d{1,4}(?:\.\d{1,6}){2}(?:(?:rc|a|b|\.post|\.dev)\d{1,4})?)(?![\w<>=]|\.\d)"
)
_OF_OTHERS = re.compile(r"(?:\b(?:in|since|from|before|until|than|to|with|requires?|of|needs?)|[<>~!])[\s`'\"]{0,3}$")


@dataclass(frozen=True)
class Named:
    """A distribution, and the version of it that a log names."""

    distribution: str
    version: str


def named(line: bytes) -> Iterator[Named]:
    """The versions that a line names, and not those of its comparisons ("removed in transformers 5.0.0")."""
    if len(line) > 1000 or not _NEEDLE.search(line):
        return
    text = line.decode("utf-8", "replace")
    for match in _VERSION.finditer(text):
        if not _OF_OTHERS.search(text[max(0, match.start() - 12) : match.start()]):
            yield Named(match[1].lower().replace("_", "-"), match[2])
