"""What `vllm-watch-requests` reads in an engine's worker."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from rlhf_patches import watching

from .watch_requests import BASE_MODEL, LIMIT, NAME

_unused = watching.Figure(
    NAME,
    "unused-adapters",
    "the trainer has sent {} adapters, and every request since the first was for the base model",
    LIMIT,
    points_to=BASE_MODEL,
    local=True,
)
FIGURES = (_unused,)


class Engine:
    """The requests to one engine since its trainer sent the first adapter.

    Attributes:
        adapters: the number of adapters that were followed by a request.
        requests: the number of requests that began since the first adapter.
        asked: whether any of these requests was for an adapter.
        new: whether no request has begun since the last adapter.
    """

    def __init__(self) -> None:
        self.adapters = self.requests = 0
        self.asked = False
        self.new = True


ENGINES: weakref.WeakKeyDictionary[Any, Engine] = weakref.WeakKeyDictionary()
"""By worker, the engines to which a trainer has sent an adapter."""


def observed() -> dict[str, Any]:
    """The figures noted so far in this process."""
    return watching.observed(*FIGURES)


def around_add_lora(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """`Worker.add_lora`, which loads an adapter; if it raises, it has loaded none."""
    result = wrapped(*args, **kwargs)
    with watching.looking(NAME):
        # All ranks of an engine get the same requests; one of each pipeline stage is its driver.
        if getattr(args[0], "lora_tensors", None) is not None and getattr(instance, "is_driver_worker", True):
            ENGINES.setdefault(instance, Engine()).new = True
    return result


def around_execute_model(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """`Worker.execute_model`, which computes one step; its argument lists the requests that begin."""
    if ENGINES:
        with watching.looking(NAME):
            engine = ENGINES.get(instance)
            if engine is not None and not engine.asked:
                _look(instance, engine, args[0].scheduled_new_reqs)
    return wrapped(*args, **kwargs)


def _look(worker: Any, engine: Engine, requests: list[Any]) -> None:
    if any(each.lora_request is not None for each in requests):
        engine.asked = True
        _unused.note(0.0, run=worker)
    elif requests:
        engine.requests += len(requests)
        if engine.new:
            engine.new = False
            engine.adapters += 1
            _unused.note(engine.adapters, f"request {engine.requests}", worker)
