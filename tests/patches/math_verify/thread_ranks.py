"""Threads that verify answers by the real Math-Verify: ``--out FOLDER [alone]``.

As the proof of math-verify-thread: timeouts that end, are disturbed, nested, or many at once.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import math_verify
from math_verify import utils
from math_verify.errors import TimeoutException

from rlhf_patches.patches.math_verify.proofs import thread_ranks
from rlhf_patches.patches.math_verify.proofs.thread_ranks import ANSWERS, in_a_thread

ENDLESS = r"\boxed{" + "(" * 80 + "x" + ")" * 80 + "}"
"""Half a minute's work for Math-Verify's parser, which learns from attempts: one of 24 pairs ended after the third."""


def endless() -> dict[str, Any]:
    """A long parse, with a second of time."""
    started = time.monotonic()
    found = math_verify.parse(ENDLESS, parsing_timeout=1)
    return {"parsed": [str(item) for item in found], "seconds": time.monotonic() - started}


def disturbed(times: int = 300) -> dict[str, int]:
    """Functions that end at about the time that they have: how many did, how many did not, and what came later.

    Each works a little longer than one that ended, and a little less than one that did not: so the two stay close,
    however late the machine at hand is with a timeout.
    """
    counted = {"ended": 0, "expired": 0, "late": 0}
    length = 0.002
    for _ in range(times):
        until = time.perf_counter() + length

        def work(until: float = until) -> None:
            while time.perf_counter() < until:
                math.sqrt(2.0)

        try:
            try:
                utils.timeout(0.002)(work)()
                counted["ended"] += 1
                length += 1e-4
            except TimeoutException:
                counted["expired"] += 1
                length -= 1e-4
            for _ in range(200):
                math.sqrt(2.0)
        except TimeoutException:
            counted["late"] += 1
    return counted


def with_a_pool() -> dict[str, Any]:
    """A function that maps a parse over threads of its own; a longer limit than it needs, if nothing waits for ever."""
    parsed: list[str] = []

    def work() -> None:
        with ThreadPoolExecutor(2) as pool:
            parsed.extend(pool.map(lambda answer: str(math_verify.parse(answer[0])), ANSWERS))

    try:
        utils.timeout(2)(work)()
    except TimeoutException:
        return {"parsed": parsed, "expired": True}
    return {"parsed": parsed, "expired": False}


def waiting() -> bool:
    """Of a function that waits longer for an event than it has: whether it did not have to wait for that to the end."""
    event = threading.Event()
    threading.Timer(2.5, event.set).start()
    try:
        utils.timeout(1)(event.wait)()
    except TimeoutException:
        return not event.is_set()
    raise AssertionError("its second was not over after two and a half")


def never_ending(threads: int = 3) -> dict[str, Any]:
    """Functions that compute until they are stopped: how each ended, and the most at a time."""
    inside, most, lock = 0, 0, threading.Lock()

    def work() -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        try:
            while True:
                math.sqrt(2.0)
        finally:
            inside -= 1

    with ThreadPoolExecutor(threads) as pool:
        results = [pool.submit(utils.timeout(1)(work)) for _ in range(threads)]
        return {"ended": [type(result.exception()).__name__ for result in results], "most": most}


def nested() -> dict[str, Any]:
    """A limit within a limit: the shorter one holds, whichever it is, and keyword arguments arrive."""

    def spin(*, seconds: float = 0.0, function: str = "") -> str:
        while time.monotonic() < until:
            time.sleep(0.001)
        return f"{seconds} {function}"

    def inner(limit: int) -> str:
        try:
            return str(utils.timeout(limit)(spin)(seconds=1.5, function="x"))
        except TimeoutException:
            if limit > 1:
                raise
            return "inner"

    found = {}
    for name, (outer, limit, length) in {"inner": (9, 1, 9), "outer": (1, 9, 9), "neither": (9, 9, 0)}.items():
        until = time.monotonic() + length
        try:
            found[name] = utils.timeout(outer)(lambda limit=limit: inner(limit) + ", and on")()
        except TimeoutException:
            found[name] = "outer"
    return found


def at_once(threads: int = 4) -> dict[str, Any]:
    """Threads whose seconds would not last if they had to share them: the most at a time, and what they return."""
    inside, most, lock = 0, 0, threading.Lock()

    def work(number: int) -> int:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        time.sleep(0.05)
        with lock:
            inside -= 1
        return number

    with ThreadPoolExecutor(threads) as pool:
        results = [pool.submit(utils.timeout(10)(work), number) for number in range(threads)]
        found = [repr(result.exception()) if result.exception() else result.result() for result in results]
    return {"most": most, "found": found}


def observe() -> dict[str, Any]:
    found = thread_ranks.observe()
    found["at once"] = at_once()
    if found["at once"]["most"]:  # only where timeouts work in threads
        found["endless"] = {"main": endless(), "thread": in_a_thread(endless)}
        found["disturbed"] = in_a_thread(disturbed)
        found["with a pool"] = in_a_thread(with_a_pool)
        found["waiting"] = {"main": waiting(), "thread": in_a_thread(waiting)}
        found["never ending"] = never_ending()
        found["nested"] = in_a_thread(nested)
    if "alone" not in sys.argv:
        found["switched off"] = [utils.timeout(seconds)(math.sqrt) is math.sqrt for seconds in (None, 0)]
    return found


def main() -> None:
    thread_ranks.main(observe)
