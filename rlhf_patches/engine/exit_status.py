"""Make a process exit with a failure where it is too late to raise an exception."""

from __future__ import annotations

import sys
from typing import Any


class _Failing:
    """A stream whose flush fails once the interpreter is finalized."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        self._stream.flush()
        if sys.is_finalizing():
            raise OSError("rlhf_patches: this process must exit with a nonzero status")


def fail() -> None:
    """Make this process exit with status 120, Python's status if a standard stream cannot be flushed at exit.

    Exit handlers of other code still run, files are closed and objects finalized. ``os._exit`` would skip all of this,
    and an exception in an exit handler does not change the exit status.
    """
    for name in ("stderr", "stdout"):
        stream = getattr(sys, name)
        if stream is not None:
            setattr(sys, name, _Failing(stream))
            return
