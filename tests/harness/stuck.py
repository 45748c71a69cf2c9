"""A thread that is stuck with a lock, for tests of what must not wait for it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

SECONDS = 20.0


@contextlib.contextmanager
def stuck_in(context: contextlib.AbstractContextManager[object]) -> Iterator[None]:
    """Another thread is in ``context`` meanwhile.

    Raises:
        AssertionError: somebody has waited for it, until it gave up.
    """
    taken, free = threading.Event(), threading.Event()
    waited = []

    def hold() -> None:
        with context:
            taken.set()
            waited.append(free.wait(SECONDS))

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert taken.wait(60)
        yield
    finally:
        free.set()
        thread.join(60)
    assert waited == [True], f"somebody has waited for it {SECONDS:.0f} s"
