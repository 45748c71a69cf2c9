"""The relations as a table, and what a run is trained on as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .relation import Relation, Verdict

if TYPE_CHECKING:
    from .labels import Trained

_MARKS = {"label": ("[", "]"), "read": ("", ""), "padding": ("<", ">")}
_COLOURS = {"label": "\033[32m", "read": "", "padding": "\033[2m"}
_WIDTH = 118
_SHOWN = 600


def lines(relations: Iterable[Relation]) -> list[str]:
    """With a head; texts that are too long go on below."""
    rows = [("RELATION", "MEASURED", "VERDICT")]
    rows += [(each.name, each.measured or "-", _said(each)) for each in relations]
    first = max(len(row[0]) for row in rows)
    second = max(len(row[1]) for row in rows if len(row[1]) <= 40)
    made = []
    for name, measured, said in rows:
        head = f"{name:{first}}  {measured:{second}}  "
        folded = textwrap.wrap(said, max(40, _WIDTH - first - second - 4)) or [""]
        if len(measured) > second:
            made.append(f"{name:{first}}  {measured}")
            head = " " * (first + second + 4)
        made.append(head + folded[0])
        made += [" " * (first + second + 4) + each for each in folded[1:]]
    return [each.rstrip() for each in made]


def _said(relation: Relation) -> str:
    word = relation.verdict.value.upper() if relation.verdict is Verdict.DEVIATES else relation.verdict.value
    return f"{word}: {relation.text}" if relation.text else word


def trained_on(trained: Trained, colours: bool) -> list[str]:
    """The first row's text: what has a label is marked, by brackets or by colour."""
    made, left = "", _SHOWN
    for text, kind in trained.pieces:
        if left <= 0:
            made += " ..."
            break
        text, left = text[:left], left - len(text)
        if kind == "padding":
            text = f"{text[:12]}..." if len(text) > 15 else text
        before, after = (_COLOURS[kind], "\033[0m" if _COLOURS[kind] else "") if colours else _MARKS[kind]
        made += before + text + after
    return made.splitlines()
