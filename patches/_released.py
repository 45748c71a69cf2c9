"""Whether the code around a repair is the releases' own: how other code uses a loss is unknown."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from types import FunctionType, MethodType
from typing import Any

logger = logging.getLogger("rlhf_patches")

_RELEASED = ("trl", "transformers", "accelerate")
_DECORATORS = ("torch", "functools", "contextlib")
_REHEARSAL = "rlhf_patches.rehearsal.trainer"  # it wraps the trainer's own methods, for one window


def others(owner: Any, *names: str, packages: tuple[str, ...] = _RELEASED) -> str:
    """The first of these methods that a subclass, a decorator or an assignment has replaced; empty if none is.

    A method that the owner does not have, as in another release, does not count.
    """
    for name in names:
        found = vars(owner).get(name, getattr(type(owner), name, None))
        if found is not None and not is_released(found, packages):
            return f"{type(owner).__name__}.{name}"
    return ""


def is_released(function: Any, packages: tuple[str, ...] = _RELEASED) -> bool:
    """Whether a function's code, or an object's class, belongs to these packages.

    A decorator of theirs does not make the function within it theirs, so that has to belong to them as well.
    """
    if not _belongs(function, packages):
        return False
    known, left = [function], _within(function)
    while left:  # rarely: most functions are not decorated
        inner = left.pop()
        if any(inner is each for each in known):
            continue
        if not _belongs(inner, (*packages, *_DECORATORS)):
            return False
        known.append(inner)
        left += _within(inner)
    return True


def _belongs(function: Any, packages: tuple[str, ...]) -> bool:
    module = written_in(function)
    return module.partition(".")[0] in packages or module == _REHEARSAL


def _within(function: Any) -> list[Any]:
    """The functions that a wrapper wraps, and those that its closure holds."""
    if isinstance(function, MethodType):
        function = function.__func__
    if not isinstance(function, FunctionType):
        return []
    wrapped = [vars(function)["__wrapped__"]] if "__wrapped__" in vars(function) else []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is empty
            if isinstance(cell.cell_contents, (FunctionType, MethodType)):
                wrapped.append(cell.cell_contents)
    return wrapped


def written_in(function: Any) -> str:
    """The module of a function's or method's code, or of another object's class, from what no decorator copies."""
    if isinstance(function, MethodType):
        function = function.__func__
    if isinstance(function, FunctionType):
        return str(function.__globals__.get("__name__"))
    return str(type(function).__module__)


def left(patch: str, other: str) -> None:
    """Log once per process, on rank 0, that a gradient stays as released, since ``other`` is not the release's."""
    stays(patch, f"{other} is not the release's own", "the gradient")


@functools.cache
def stays(patch: str, why: str, what: str) -> None:
    """Log once per process, on rank 0, that what a patch repairs stays as released, and why."""
    if _is_first_rank():
        logger.warning("%s: %s: %s stays as released", patch, why, what)


def _is_first_rank() -> bool:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return bool(distributed.get_rank() == 0)
    return os.environ.get("RANK", "0") == "0"
