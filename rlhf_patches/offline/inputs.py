"""Read a user's input up to a limit of bytes: it may be a device, an endless pipe, or damaged."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import BinaryIO

from ..definitions.words import printable


class InputError(Exception):
    """The input cannot be read; the message has the name and the reason."""


def standard_input() -> BinaryIO:
    """Standard input.

    Raises:
        InputError: standard input is closed.
    """
    if sys.stdin is None:
        raise InputError("standard input is closed: give a path")
    return sys.stdin.buffer


def beside(folder: Path | None, name: str) -> Path | None:
    """The regular file with this name, relative to a folder; None if it is not there, or if there is no folder."""
    try:
        return folder / name if folder is not None and (folder / name).is_file() else None
    except (OSError, ValueError):  # a name that is too long, or has a NUL
        return None


def text(path: str, limit: int) -> str:
    """The text of a file, or of standard input for ``-``, in UTF-8.

    Raises:
        InputError: the file cannot be read, has more than ``limit`` bytes, or is not UTF-8.
    """
    what = "standard input" if path == "-" else path
    try:
        if path == "-":
            data = standard_input().read(limit + 1)
        else:
            with Path(path).open("rb") as stream:
                data = stream.read(limit + 1)
        if len(data) > limit:
            raise InputError(f"{what} has more than {limit >> 20} MiB")
        return data.decode("utf-8-sig")
    except (OSError, ValueError, MemoryError) as error:  # a NUL in the path, or not UTF-8
        raise InputError(f"{printable(what)} cannot be read: {error or type(error).__name__}") from error
