"""Slices: a module's text with every line blanked but what decides how one function compiles.

Those are the function itself, the classes around it (private names, ``super()``), which of the names in it the module
imports (CPython compiles ``module.function()`` otherwise than ``object.method()``), and future statements. That a slice
gives the very code object that the whole module gives is proven for each text of the record (`known`), and over the
standard library by a test; who relies on it compares with the code that runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from .places import Place


def cut(lines: Sequence[str], place: Place) -> list[str]:
    """The lines of the slice of the function at ``place``, whose `Place.slice` is set: to where the function ends."""
    assert place.slice is not None
    last, classes, imported, future = place.slice
    begin = place.first_line - 1
    kept = [*[""] * begin, *lines[begin:last]]
    # A class takes a line of its own before its methods, so there is room; what it derives from does not matter.
    headers = [f"class {name}:" for name in classes] or ["if 1:"] * (place.column > 0)
    for depth, header in enumerate(headers):
        kept[begin - len(headers) + depth] = " " * depth + header
    if future:
        kept[0] = f"from __future__ import {', '.join(future)}"
    return [*kept, f"import {', '.join(imported)}"] if imported else kept
