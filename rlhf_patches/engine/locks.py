"""Locks between threads, with a timeout."""

from __future__ import annotations

from _thread import RLock

TIMEOUT = 60.0
"""The timeout in seconds; a thread holds a lock for milliseconds, or while plugins are imported."""


class LockTimeout(RuntimeError):
    """Another thread holds a lock for longer than the timeout, so it will probably never release it."""


class Lock(RLock):  # type: ignore[misc]
    """An RLock with an acquisition timeout: a framework's import waits for it, on a rank perhaps."""

    what = "changing functions"
    timeout: float | None = None

    def __enter__(self) -> bool:  # type: ignore[override]
        if not self.acquire(timeout=TIMEOUT if self.timeout is None else self.timeout):
            self.timeout = 0.0  # do not wait again
            raise LockTimeout(f"another thread has been {self.what} for {TIMEOUT:.0f} s")
        self.timeout = None
        return True


class LoadingLock(Lock):  # type: ignore[misc]
    what = "loading the patches"
