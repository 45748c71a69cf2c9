"""Change a patch's range in the file that defines it."""

from __future__ import annotations

from pathlib import Path

from ..definitions import registry
from ..definitions.bug import KnownBug


class RangeError(Exception):
    """A range cannot be moved; the message has the reason and what to write by hand. The file is not changed."""


def move(patch: KnownBug, old: str, new: str) -> Path:
    """Replace a range in the source text. It must occur exactly once, so that nothing else changes.

    Args:
        patch: the patch, as imported.
        old: the range of one of its variants, as written.
        new: the new range.

    Returns:
        the file.

    Raises:
        RangeError: no source file has the range, or it occurs several times.
    """
    wanted = f"{patch.name}: the range {old or 'of every version'} is not moved to {new}: "
    names = (str(getattr(module, "__file__", None)) for module in registry.modules_of(patch))
    files = {Path(name) for name in names if name.endswith(".py")}
    places = []
    for file in sorted(files):
        text = file.read_bytes().decode("utf-8")  # keeps newlines
        for quoted in (f'"{old}"', f"'{old}'"):
            places += [(file, text, quoted)] * text.count(quoted)
    if len(places) != 1:
        where = ", ".join(map(str, sorted(files))) or "no module that has the patch as a global"
        raise RangeError(f"{wanted}it occurs {len(places)} times in {where}, expected once: change it by hand")
    ((file, text, quoted),) = places
    if {"site-packages", "dist-packages"} & set(file.parts):
        raise RangeError(
            f"{wanted}{file} is an installed copy: install the patch from its source with `pip install -e`"
        )
    try:
        file.write_bytes(text.replace(quoted, quoted[0] + new + quoted[0]).encode("utf-8"))
    except OSError as error:
        raise RangeError(f"{wanted}{file} cannot be written: {error.strerror}") from error
    return file
