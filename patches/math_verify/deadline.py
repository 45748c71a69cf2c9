"""A time limit for a function in any thread, without a signal."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any

from math_verify.errors import TimeoutException

one_at_a_time = threading.RLock()


# The thread that had it is not in a forked child.
os.register_at_fork(after_in_child=lambda: globals().update(one_at_a_time=threading.RLock()))


def around_timeout(wrapped: Callable[..., Any], _instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Math-Verify's ``timeout``: a decorator that gives a function ``timeout_seconds`` (10), in any thread.

    Source: https://github.com/huggingface/Math-Verify, ``math_verify/utils.py``.
    """
    decorate = wrapped(*args, **kwargs)
    seconds = (*args, *kwargs.values(), 10)[0]
    if os.name != "posix" or seconds is None or seconds <= 0:
        return decorate

    def decorate_for_any_thread(function: Callable[..., Any]) -> Callable[..., Any]:
        with_alarm = decorate(function)

        def limited(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                return with_alarm(*args, **kwargs)
            with one_at_a_time:
                deadline = Deadline(seconds)
                try:
                    return function(*args, **kwargs)
                finally:
                    deadline.end()

        return limited

    return decorate_for_any_thread


class Deadline:
    """Raises ``TimeoutException`` in the thread that makes it, once its seconds are over, unless ended before."""

    def __init__(self, seconds: float) -> None:
        self._thread = ctypes.c_ulong(threading.get_ident())
        self._lock, self._over = threading.Lock(), False
        self._timer = threading.Timer(seconds, self._expire)
        self._timer.daemon = True
        self._timer.start()

    def _expire(self) -> None:
        with self._lock:
            if not self._over:
                _raise_in(self._thread, ctypes.py_object(TimeoutException))

    def end(self) -> None:
        """Nothing is raised from here on, but perhaps here."""
        self._timer.cancel()
        with self._lock:
            self._over = True
        _raise_in(self._thread, None)  # what was raised, and has not arrived


_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
