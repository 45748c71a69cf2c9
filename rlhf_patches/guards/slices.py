"""Slices: a module's text in which only the lines that affect one function's compilation are kept.

Those are the function itself, the enclosing classes (private names, ``super()``), the imports of names in it (CPython
compiles ``module.function()`` and ``object.method()`` differently), and future statements. For each text of the record
(`known`), and for the standard library by a test, it is verified that a slice gives the same code object as the whole
module; callers compare it with the code that runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from .places import Place


def cut(lines: Sequence[str], place: Place) -> list[str]:
    """Return the lines of the slice of the function at ``place``, up to the function's end; `Place.slice` is set."""
    assert place.slice is not None
    last, classes, imported, future = place.slice
    begin = place.first_line - 1
    kept = [*[""] * begin, *lines[begin:last]]
    # A class has its own line before its methods, so there is room; its bases do not matter.
    headers = [f"class {name}:" for name in classes] or ["if 1:"] * (place.column > 0)
    for depth, header in enumerate(headers):
        kept[begin - len(headers) + depth] = " " * depth + header
    if future:
        kept[0] = f"from __future__ import {', '.join(future)}"
    return [*kept, f"import {', '.join(imported)}"] if imported else kept
