"""What a user names, or pipes in, as bytes up to a limit: it may be a device, a pipe that never ends, or damaged."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import BinaryIO

from ..definitions.words import printable


class InputError(Exception):
    """It cannot be read; the message says what and why."""


def standard_input() -> BinaryIO:
    """Standard input.

    Raises:
        InputError: it is closed.
    """
    if sys.stdin is None:
        raise InputError("standard input is closed: give a path")
    return sys.stdin.buffer


def text(path: str, limit: int) -> str:
    """A file, or standard input for ``-``, as UTF-8.

    Raises:
        InputError: it cannot be read, has more than ``limit`` bytes, or is no such text.
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
    except (OSError, ValueError, MemoryError) as error:  # a NUL in the path, and what is no UTF-8
        raise InputError(f"{printable(what)} cannot be read: {error or type(error).__name__}") from error
