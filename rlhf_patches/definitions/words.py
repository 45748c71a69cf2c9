"""Values, counts, lines and tables as text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

WIDTH = 130
"""The width of a line in characters without a terminal, as in logs."""
_LEAST = 36  # the smallest width of the last column
_MOST = 44  # the largest width of another column in a pipe: one long cell would pad all others
_INDENT = 4


def finite(value: float) -> float | str:
    """Return a number for JSON, with NaN and infinities as text."""
    return value if math.isfinite(value) else str(value)


def observed_text(value: object) -> str:
    """Return an observation of a patch or of a watch's figure: "0.31 at worst, at step 3, of 40"."""
    if not isinstance(value, Mapping):
        return str(value)
    worst, at, warning = value.get("worst"), value.get("at"), value.get("warning")
    text = f"{worst:.3g}" if isinstance(worst, (int, float)) else str(worst)
    text += f" at worst{f', at {at}' if at else ''}, of {value.get('values')}"
    return f"{text}; warning: {warning}" if warning else text


def printable(text: str) -> str:
    """Escape text from outside to one line without control characters and without unencodable characters."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def plural(count: int, one: str, many: str = "") -> str:
    """Return a count with its noun: "1 patch", "2 patches"; without ``many``, the plural adds an s."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def layout(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int | None,
    below: Sequence[Sequence[str]] = (),
) -> list[str]:
    """Format rows in columns. Only the last cell wraps, no word is broken, and no line ends in spaces.

    Args:
        heads: the names of the columns.
        rows: the cells, each of one line.
        width: the width of a terminal or a log. If the columns leave too little of it, the last cell is put below its
            row. None for a pipe: no cell wraps.
        below: lines to put below each row.
    """
    import textwrap  # only for a table

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
