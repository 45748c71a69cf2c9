"""What a thread reads, parses and compiles once, however many patches look at it; forgotten at the end."""

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
    """Within it this thread reads, parses and compiles a text once, however many patches look at it.

    At its end all is forgotten: syntax trees are large, and a training run is long.

    Args:
        kept: how many results are kept, those that were used last. Texts that run in this process anyway need no limit.
    """
    if _memory.made is not None:
        yield
        return
    with no_collection():  # to the end of the trees: a collection while they live is one of the whole heap
        try:  # first: a signal's handler may raise anywhere
            _memory.made, _memory.small, _memory.kept = {}, {}, kept
            yield
        finally:
            _memory.made = _memory.small = None


def remembered(key: Hashable, make: Callable[[], _Made], small: bool = False) -> _Made:
    """What ``make()`` returns or raises, made anew unless `parsed_once` has that of an equal key.

    What is ``small`` does not count among the few that are kept.
    """
    made = _memory.small if small else _memory.made
    if made is None:
        return make()
    if key in made:
        made[key] = made.pop(key)  # the one that was used last comes last
    else:
        try:
            found: tuple[Any, Exception | None] = make(), None
        except no_signal(Exception) as error:
            found = None, error
        while len(made) >= _memory.kept and not small:
            del made[next(iter(made))]
        made[key] = found
    result, raised = made[key]
    if raised is not None:
        raise raised.with_traceback(None)
    return result  # type: ignore[no-any-return]


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Without the cyclic garbage collector: a tree is many objects and no garbage.

    They would set off a walk through the whole heap of the frameworks, which takes 20 times as long as the parser.
    """
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()
