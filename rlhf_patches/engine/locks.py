"""Locks between threads that are not waited for without end."""

from __future__ import annotations

from _thread import RLock

TIMEOUT = 60.0
"""Seconds for which one thread waits for another; each holds a lock for milliseconds, or while plugins are imported."""


class LockTimeout(RuntimeError):
    """Another thread has held a lock for so long that it will hold it for good."""


class Lock(RLock):  # type: ignore[misc]
    """An RLock with an acquisition timeout: a framework's import is behind it, and may be a rank's."""

    what = "changing functions"
    timeout: float | None = None

    def __enter__(self) -> bool:  # type: ignore[override]
        if not self.acquire(timeout=TIMEOUT if self.timeout is None else self.timeout):
            self.timeout = 0.0  # nobody waits a second time
            raise LockTimeout(f"another thread has been {self.what} for {TIMEOUT:.0f} s")
        self.timeout = None
        return True


class LoadingLock(Lock):  # type: ignore[misc]
    what = "loading the patches"
