"""Failed calls in ms-swift's rollout workers: no rollouts from weights that are not the policy's."""

from __future__ import annotations

import importlib
import logging
import sys
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

_SAMPLING = ("infer", "async_infer")
_FAILED: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

logger = logging.getLogger(__name__)


class Failure:
    """A result in place of completions: false, as None is, but iterating it raises the reason.

    Raises:
        fastapi.HTTPException: in its iterator; the trainer's client then raises with the reason.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        raise importlib.import_module("fastapi").HTTPException(500, self.reason)  # the server is a FastAPI application


def before_call(engine: Any, method_name: str, kwargs: Mapping[str, Any]) -> None:
    """Raise if ``engine`` is to sample after a failed weight update; clear the failure for a new trainer.

    Raises:
        RuntimeError: the worker's loop catches it, like errors of the call itself.
    """
    if not _FAILED:
        return
    if method_name == "collective_rpc" and kwargs.get("method") == "init_communicator":
        _FAILED.pop(engine, None)  # a trainer that connects now sends all weights first
    elif method_name in _SAMPLING and engine in _FAILED:
        raise RuntimeError(f"no rollouts, because the weights are not the policy's: {_FAILED[engine]}")


def after_failure(engine: Any, method_name: str, kwargs: Mapping[str, Any]) -> Failure | None:
    """The result of a call that has just raised; called where the exception is handled."""
    reason = f"{type(sys.exc_info()[1]).__name__}: {sys.exc_info()[1]}"
    if method_name in _SAMPLING:
        return Failure(f"{method_name} failed in a rollout worker: {reason}")
    called = str(kwargs.get("method")) if method_name == "collective_rpc" else ""
    if called.startswith("update_") or called == "process_weights_after_loading":
        _FAILED.setdefault(engine, f"{called} failed ({reason})")
        logger.error("%s failed: rollouts are refused until a new trainer connects", called)
    return None
