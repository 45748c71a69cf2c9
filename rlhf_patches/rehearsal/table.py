"""Formats the relations as a table, and the trained tokens as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .relation import Relation, Verdict

if TYPE_CHECKING:
    from .labels import Trained

_MARKS = {"label": ("[", "]"), "read": ("", ""), "padding": ("<", ">")}
_COLORS = {"label": "\033[32m", "read": "", "padding": "\033[2m"}
_WIDTH = 118
_SHOWN = 600


def lines(relations: Iterable[Relation]) -> list[str]:
    """Return the table's lines with a header; long texts wrap."""
    rows = [("RELATION", "MEASURED", "VERDICT")]
    rows += [(each.name, each.measured or "-", _verdict_text(each)) for each in relations]
    first = max(len(row[0]) for row in rows)
    second = max(len(row[1]) for row in rows if len(row[1]) <= 40)
    made = []
    for name, measured, verdict in rows:
        head = f"{name:{first}}  {measured:{second}}  "
        folded = textwrap.wrap(verdict, max(40, _WIDTH - first - second - 4)) or [""]
        if len(measured) > second:
            made.append(f"{name:{first}}  {measured}")
            head = " " * (first + second + 4)
        made.append(head + folded[0])
        made += [" " * (first + second + 4) + each for each in folded[1:]]
    return [each.rstrip() for each in made]


def _verdict_text(relation: Relation) -> str:
    word = relation.verdict.value.upper() if relation.verdict is Verdict.DEVIATES else relation.verdict.value
    return f"{word}: {relation.text}" if relation.text else word


def trained_on(trained: Trained, colors: bool) -> list[str]:
    """Return the first row's text with the labeled tokens marked by brackets or by color."""
    made, left = "", _SHOWN
    for text, kind in trained.pieces:
        if left <= 0:
            made += " ..."
            break
        text, left = text[:left], left - len(text)
        if kind == "padding":
            text = f"{text[:12]}..." if len(text) > 15 else text
        before, after = (_COLORS[kind], "\033[0m" if _COLORS[kind] else "") if colors else _MARKS[kind]
        made += before + text + after
    return made.splitlines()
