"""A per-thread cache: a text is read, parsed and compiled once for all patches; the cache is cleared at the end."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

from ..import_system import no_signal

_Made = TypeVar("_Made")


class _Memory(threading.local):
    made: dict[Hashable, tuple[Any, Exception | None]] | None = None
    small: dict[Hashable, tuple[Any, Exception | None]] | None = None
    kept: float = 0


_memory = _Memory()


@contextlib.contextmanager
def parsed_once(kept: float = 12) -> Iterator[None]:
    """Within the context, this thread reads, parses and compiles each text once for all patches.

    The cache is cleared at the end: syntax trees are large, and a training run is long.

    Args:
        kept: the number of most recently used results to keep. Texts that this process runs need no limit.
    """
    if _memory.made is not None:
        yield
        return
    with no_collection():  # until the trees are freed: a collection while they exist visits the whole heap
        try:  # first: a signal handler may raise anywhere
            _memory.made, _memory.small, _memory.kept = {}, {}, kept
            yield
        finally:
            _memory.made = _memory.small = None


def remembered(key: Hashable, make: Callable[[], _Made], small: bool = False) -> _Made:
    """Return or raise the result of ``make()``; `parsed_once` caches it by key.

    ``small`` results do not count for the limit.
    """
    made = _memory.small if small else _memory.made
    if made is None:
        return make()
    if key in made:
        made[key] = made.pop(key)  # the most recently used result comes last
    else:
        try:
            outcome: tuple[Any, Exception | None] = make(), None
        except no_signal(Exception) as error:
            outcome = None, error
        while len(made) >= _memory.kept and not small:
            del made[next(iter(made))]
        made[key] = outcome
    result, raised = made[key]
    if raised is not None:
        raise raised.with_traceback(None)
    return result  # type: ignore[no-any-return]


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Disable the cyclic garbage collector within the context: a syntax tree is many objects without cycles.

    The objects would trigger a collection of the frameworks' whole heap, which takes 20 times as long as the parser.
    """
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()
