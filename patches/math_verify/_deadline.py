"""A time limit for a function in any thread, without a signal."""

from __future__ import annotations

import ctypes
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from math_verify.errors import TimeoutException

GRACE = 1.0
"""Seconds past its limit after which a function counts as stuck: in a sleep, a lock or a long call of C code."""


def around_timeout(wrapped: Callable[..., Any], _instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Math-Verify's ``timeout``: a decorator that limits a function to ``timeout_seconds`` (10), in any thread.

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
            if getattr(_this_thread, "limited", False):  # by an outer function, with or without the turn
                return within(seconds, function, *args, **kwargs)
            turn, taken = _turn, _turn.take(seconds)
            _this_thread.limited = True
            try:
                return within(seconds, function, *args, **kwargs)
            finally:
                _this_thread.limited = False
                if taken:
                    turn.give_back()

        return limited

    return decorate_for_any_thread


def within(seconds: float, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call the function, and raise ``TimeoutException`` in it once the seconds are over."""
    deadline = Deadline(seconds)
    try:
        return function(*args, **kwargs)
    finally:
        deadline.over = True  # first, and without a call: an outer function's exception may arrive at any call
        deadline.end()


class Turn:
    """Admits one thread at a time, with a bounded wait."""

    def __init__(self) -> None:
        self._lock, self._ends = threading.Lock(), math.inf

    def take(self, seconds: float) -> bool:
        """Wait for the turn, for at most the seconds, and not for a stuck thread. Returns whether it was given."""
        deadline = time.monotonic() + seconds
        while True:
            left = min(deadline, self._ends + GRACE) - time.monotonic()
            if self._lock.acquire(timeout=min(max(left, 0.0), 0.05)):
                self._ends = time.monotonic() + seconds
                return True
            if left <= 0:
                return False

    def give_back(self) -> None:
        """Release the turn that `take` has given."""
        self._ends = math.inf  # before the next thread sets its end
        self._lock.release()


_turn = Turn()
_this_thread = threading.local()


# A forked child does not have the thread that held the turn.
os.register_at_fork(after_in_child=lambda: globals().update(_turn=Turn()))


class Deadline:
    """Raises ``TimeoutException`` in its creator's thread once its seconds are over, unless ended before."""

    def __init__(self, seconds: float) -> None:
        self.over = False
        self._thread, self._raised = ctypes.c_ulong(threading.get_ident()), False
        self._lock = threading.Lock()
        self._timer = threading.Timer(seconds, self._expire)
        self._timer.daemon = True
        self._timer.start()

    def _expire(self) -> None:
        with self._lock:  # waits: in the timer's own thread; `end` releases it at once
            if not self.over:
                self._raised = True
                _raise_in(self._thread, ctypes.py_object(TimeoutException))

    def end(self) -> None:
        """End the deadline: it raises nothing from here on, but may raise within this call."""
        self._timer.cancel()
        if self._lock.acquire(timeout=GRACE):  # a forked child has no timer to release it
            self._lock.release()
        if self._raised:  # else a pending exception is an outer function's
            _raise_in(self._thread, None)


_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
