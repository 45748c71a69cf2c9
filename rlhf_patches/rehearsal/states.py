"""Snapshots of the state that a replay uses and restores: random states, buffers, plain attributes."""

from __future__ import annotations

import contextlib
import random
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_PLAIN = (str, int, float, bool, type(None), bytes)
_SMALL = 4096


@dataclass(frozen=True)
class Random:
    """The states of the random generators of Python, NumPy and torch, including CUDA's."""

    python: Any
    numpy: Any
    torch_cpu: torch.Tensor
    devices: Any

    @classmethod
    def now(cls) -> Random:
        numpy = sys.modules.get("numpy")
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
        return cls(random.getstate(), numpy.random.get_state() if numpy else None, torch.get_rng_state(), cuda)

    def another(self) -> Random:
        """Return different states, except NumPy's."""
        cuda = None if self.devices is None else torch.Generator("cuda").manual_seed(1).get_state()
        return Random(random.Random(1).getstate(), self.numpy, torch.Generator().manual_seed(1).get_state(), cuda)

    def equals(self, other: Random) -> bool:
        return same(vars(self), vars(other))

    def put_back(self) -> None:
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        torch.set_rng_state(self.torch_cpu)
        if self.devices is not None:
            torch.cuda.set_rng_state(self.devices)


class Buffers:
    """Copies of a model's buffers, to restore them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]

    def put_back(self) -> None:
        with torch.no_grad():
            for buffer, value in self._kept:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


class Attributes:
    """An object's plain attributes: numbers, texts, containers of them and of tensors. Other objects are left out."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._names = set(vars(owner))
        self._kept = {name: kept for name, value in vars(owner).items() if (kept := _keep(value))}

    def put_back(self) -> None:
        mine = vars(self._owner)
        for name, (value, copied) in self._kept.items():
            if isinstance(value, torch.Tensor):
                with torch.no_grad():
                    value.copy_(copied)
            elif not isinstance(value, _PLAIN):
                _refill(value, copied)
            mine[name] = value
        for name in set(mine) - self._names:
            del mine[name]


class Counters:
    """The modules' numeric attributes, without torch's own and without ``training``."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._kept = [
            (module, name, value)
            for module in model.modules()
            for name, value in vars(module).items()
            if not name.startswith("_") and name != "training" and isinstance(value, (int, float))
        ]

    def put_back(self) -> None:
        for module, name, value in self._kept:
            if vars(module).get(name) is not value:
                vars(module)[name] = value


@contextlib.contextmanager
def zeroed(numbers: Sequence[tuple[dict[str, Any], str]]) -> Iterator[bool]:
    """Set attributes to 0 within the context; yields whether any was not 0.

    Args:
        numbers: pairs of an object's ``vars`` and an attribute's name.
    """
    kept = [(own, name, own[name]) for own, name in numbers]
    try:
        for own, name in numbers:
            own[name] = 0.0
        yield any(value for _, _, value in kept)
    finally:
        for own, name, value in kept:
            own[name] = value


def _keep(value: Any) -> tuple[Any, Any] | None:
    if isinstance(value, _PLAIN):
        return value, value
    if isinstance(value, torch.Tensor):
        return (value, value.detach().clone()) if value.numel() <= _SMALL and value.is_leaf else None
    if isinstance(value, (dict, list, set, deque)):
        return value, _copy(value)
    return None


def _copy(value: Any) -> Any:
    """Copy nested containers."""
    if isinstance(value, dict):
        return {key: _copy(each) for key, each in value.items()}
    if isinstance(value, (list, deque)):
        return [_copy(each) for each in value]
    return set(value) if isinstance(value, set) else value


def _refill(container: Any, copied: Any) -> None:
    """Restore a container's content; nested containers that still exist keep their identity."""
    if isinstance(container, dict):
        inside = {key: _inside(container.get(key), each) for key, each in copied.items()}
        container.clear()
        container.update(inside)
    elif isinstance(container, (list, deque)):
        now = [*container]
        inside_list = [_inside(now[place] if place < len(now) else None, each) for place, each in enumerate(copied)]
        container.clear()
        container.extend(inside_list)
    else:
        container.clear()
        container.update(copied)


def _inside(now: Any, copied: Any) -> Any:
    if isinstance(now, (dict, list, deque, set)) and isinstance(copied, (dict, list, set)):
        _refill(now, copied)
        return now
    return copied


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal: containers of tensors, of NumPy's arrays and of plain values."""
    if isinstance(one, torch.Tensor):
        return bool(torch.equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one.tobytes() == other.tobytes() if hasattr(one, "tobytes") else one == other)


def copy_of(value: Any) -> Any:
    """Copy a micro-batch's inputs, which a loss may change: clones of tensors, new containers."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, Mapping):
        made = {key: copy_of(each) for key, each in value.items()}
        return made if type(value) is dict else _like(value, made)
    if isinstance(value, list):
        return [copy_of(each) for each in value]
    if type(value) is tuple:
        return tuple(copy_of(each) for each in value)
    return value


def _like(value: Any, made: dict[Any, Any]) -> Any:
    """Return a mapping of the same class (transformers' BatchEncoding), or a dictionary if that fails."""
    try:
        return type(value)(made)
    except Exception:  # a class of the user
        return made
