"""A patch's range, moved in the file that defines it."""

from __future__ import annotations

from pathlib import Path

from ..definitions import registry
from ..definitions.bug import KnownBug


class RangeError(Exception):
    """A range cannot be moved; the message says why, and what to write by hand. Nothing is written."""


def move(patch: KnownBug, old: str, new: str) -> Path:
    """Put another range in place of one, as text: it has to stand there once, so that nothing else becomes another.

    Args:
        patch: as it was imported.
        old: the range of one of its variants, as written there.
        new: what it becomes.

    Returns:
        the file.

    Raises:
        RangeError: no file of an author has it, or it stands there several times.
    """
    wanted = f"{patch.name}: the range {old or 'of every version'} is not moved to {new}: "
    names = (str(getattr(module, "__file__", None)) for module in registry.modules_of(patch))
    files = {Path(name) for name in names if name.endswith(".py")}
    found = []
    for file in sorted(files):
        text = file.read_bytes().decode("utf-8")  # newlines stay as they are
        for quoted in (f'"{old}"', f"'{old}'"):
            found += [(file, text, quoted)] * text.count(quoted)
    if len(found) != 1:
        where = ", ".join(map(str, sorted(files))) or "no module that has the patch as a global"
        raise RangeError(f"{wanted}it stands {len(found)} times in {where}, expected once: write it there yourself")
    ((file, text, quoted),) = found
    if {"site-packages", "dist-packages"} & set(file.parts):
        raise RangeError(
            f"{wanted}{file} is an installed copy: install the patch with `pip install -e`, from its source"
        )
    try:
        file.write_bytes(text.replace(quoted, quoted[0] + new + quoted[0]).encode("utf-8"))
    except OSError as error:
        raise RangeError(f"{wanted}{file} cannot be written: {error.strerror}") from error
    return file
