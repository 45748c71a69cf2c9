"""The end of a process as a failure, where it is too late to raise anything."""

from __future__ import annotations

import sys
from typing import Any


class _Failing:
    """A stream that cannot be flushed once the interpreter is finalised."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        self._stream.flush()
        if sys.is_finalizing():
            raise OSError("rlhf_patches: this process is to end with a status other than 0")


def fail() -> None:
    """Have this process end with status 120, Python's own for a standard stream that could not be flushed at exit.

    What other code does at exit is done before and after that, files are closed and objects finalised: none of it is
    with ``os._exit``, and what an exit handler raises does not count.
    """
    for name in ("stderr", "stdout"):
        stream = getattr(sys, name)
        if stream is not None:
            setattr(sys, name, _Failing(stream))
            return
