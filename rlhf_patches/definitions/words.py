"""Values, counts, lines and tables as text, for people and for JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

WIDTH = 130
"""Characters of a line, where no terminal says otherwise: logs."""
_LEAST = 36  # characters for the last column
_MOST = 44  # for another one in a pipe: beside one long cell the others would be blanks
_INDENT = 4


def finite(value: float) -> float | str:
    """A number as JSON has it, which knows no NaN and nothing infinite: those as text."""
    return value if math.isfinite(value) else str(value)


def observed_text(value: object) -> str:
    """What a patch, or a figure of a watch, has seen: "0.31 at worst, at step 3, of 40"."""
    if not isinstance(value, Mapping):
        return str(value)
    worst, at, warning = value.get("worst"), value.get("at"), value.get("warning")
    said = f"{worst:.3g}" if isinstance(worst, (int, float)) else str(worst)
    said += f" at worst{f', at {at}' if at else ''}, of {value.get('values')}"
    return f"{said}; warning: {warning}" if warning else said


def printable(text: str) -> str:
    """Text from outside as one line: it must not move the cursor, nor be what no terminal can encode."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def plural(count: int, one: str, many: str = "") -> str:
    """A number of things: "1 patch", "2 patches"; without ``many`` their name takes an s."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def layout(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int | None,
    below: Sequence[Sequence[str]] = (),
) -> list[str]:
    """Rows in columns. Only the last cell is ever wrapped, no word is broken, and no line ends in blanks.

    Args:
        heads: the names of the columns.
        rows: their cells, each of one line.
        width: of a terminal or a log. Where the columns leave too little of it, the last cell goes below its row. None
            for a pipe: no cell is wrapped.
        below: lines to put below each row.
    """
    import textwrap  # only where a table is asked for

    columns = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads) - 1)]
    if width is None:
        columns = [min(size, _MOST) for size in columns]
    indent = sum(columns) + 2 * len(columns)
    stacked = width is not None and width - indent < _LEAST
    indent = _INDENT if stacked or width is None else indent
    lines = []
    for row, more in zip([heads, *rows], [(), *(below or [()] * len(rows))], strict=True):
        start = "  ".join(cell.ljust(size) for cell, size in zip(row, columns, strict=False))
        texts = [row[-1], *more]
        if width is not None:
            room = max(width - indent, _LEAST)
            wrapped = [textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) for text in texts]
            texts = [line for each in wrapped for line in each or [""]]
        if stacked and row is heads:
            texts = []
        elif not stacked:
            start += "  " + texts.pop(0)
        lines += [start.rstrip(), *(" " * indent + text for text in texts if text)]
    return lines
