"""Router logits that transformers records, under reentrant gradient checkpointing: they keep their graph."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint

import rlhf_patches

from .._released import is_released

NAME = "transformers-router-loss-reentrant"
_KEY = "router_logits"
_CAPTURING = "transformers.utils.output_capturing"  # from 5.2 on
_GENERIC = "transformers.utils.generic"  # before: a model replaces the forward of what it records, for one call
_CELLS = {"collected_outputs", "key", "index", "orig_forward"}

_Rerun = Callable[[], "contextlib.AbstractContextManager[list[list[Any]]]"]


class Recorded(functools.partial):  # type: ignore[type-arg]
    """transformers' own checkpointing function; recorded router logits are outputs of what it checkpoints."""

    released: Callable[..., Any]
    is_said = False

    def __call__(self, /, *args: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():  # compiled code has no run without a graph
            return self.released(*args, **named)
        return _checkpointed(self, *args, **named)

    def __reduce__(self) -> Any:
        """Pickled, it is the release's, so that a saved model needs no package of ours."""
        return self.released.__reduce__()

    def __copy__(self) -> Recorded:
        return _of(self.released)

    def __deepcopy__(self, memo: Any) -> Recorded:
        return _of(copy.deepcopy(self.released, memo))


def _of(made: Any) -> Recorded:
    found = Recorded(made.func, **made.keywords)
    found.released = made
    return found


def recorded(model: Any, made: Any) -> Any:
    """The function that layers of the model are checkpointed with, for the one that transformers made."""
    if made.keywords.get("use_reentrant") is False or not _can_record(model):  # without a value: torch's default
        rlhf_patches.decided(NAME, False)
        return made
    if made.args or made.func is not torch_checkpoint.checkpoint or not is_released(made.func, ("torch",)):
        return made
    return _of(made)


def _can_record(model: Any) -> bool:
    return any(_KEY in (getattr(each, "_can_record_outputs", None) or ()) for each in model.modules())


def _checkpointed(checkpointing: Recorded, /, *args: Any, **named: Any) -> Any:
    is_on = bool(args) and torch.is_grad_enabled() and rlhf_patches.in_force(NAME)
    record = _record_of(args[0]) if is_on else None
    if record is None:
        return checkpointing.released(*args, **named)
    run = _Run(args[0], record)
    result = checkpointing.released(run, *args[1:], **named)
    total = sum(run.counts)
    if not total:
        return result
    logits = result[-total:]
    if all(each.requires_grad for each in logits):
        record.replace(logits)
        if not checkpointing.is_said:
            node = logits[0].grad_fn  # known: the node that torch's checkpoint has just made
            node.register_prehook(functools.partial(_say, checkpointing, total))  # writes: it only says what occurs
    return result[0] if run.is_single else result[:-total]


def _say(checkpointing: Recorded, count: int, gradients: tuple[Any, ...]) -> None:
    """Before a layer's backward pass: the bug occurs if the loss has a gradient for the logits."""
    if not checkpointing.is_said and any(each is not None for each in gradients[-count:]):
        checkpointing.is_said = True  # writes: an attribute of our own function
        rlhf_patches.decided(NAME, True)


class _Run:
    """A layer's function for torch: first without a graph, then with one, with the same outputs.

    It lives as long as the graph, so it does not keep the record, whose logits keep the graph.
    """

    def __init__(self, function: Callable[..., Any], record: _Record) -> None:
        self._function, self._rerun = function, record.rerun
        self._record: _Record | None = record
        self.counts: tuple[int, ...] = ()
        self.is_single = False

    def __call__(self, *args: Any) -> Any:
        if self._record is not None:
            record, self._record = self._record, None
            return self._first(record, self._function(*args))
        if not any(self.counts):
            return self._function(*args)
        with self._rerun() as found:
            output = self._function(*args)
        if tuple(map(len, found)) != self.counts:
            return output
        return (*(output if isinstance(output, tuple) else (output,)), *_flat(found))

    def _first(self, record: _Record, output: Any) -> Any:
        if torch.is_grad_enabled():  # not reentrant
            return output
        found = record.new()
        is_single = isinstance(output, torch.Tensor)
        if not (is_single or type(output) is tuple):
            return output
        if not all(isinstance(each, torch.Tensor) and each.is_floating_point() for each in _flat(found)):
            return output
        self.is_single, self.counts = is_single, tuple(map(len, found))
        if not any(self.counts):
            return output
        # Copies: no output may be another one, or a view of it.
        return (*((output,) if is_single else output), *(each.clone() for each in _flat(found)))


def _flat(found: list[list[Any]]) -> list[Any]:
    return [each for part in found for each in part]


class _Record:
    """Where the running models collect router logits, and how many they had before the layer."""

    def __init__(self, collected: list[Any], rerun: _Rerun) -> None:
        self._collected, self.rerun = collected, rerun
        self._starts = [len(each.get(_KEY, ())) for each in collected]

    def new(self) -> list[list[Any]]:
        return [list(each.get(_KEY, ())[start:]) for each, start in zip(self._collected, self._starts, strict=True)]

    def replace(self, logits: Any) -> None:
        """The same logits with a graph, in the same order."""
        left = list(logits)
        for each, start in zip(self._collected, self._starts, strict=True):
            before = each.get(_KEY, ())
            count = len(before) - start
            own, left = left[:count], left[count:]
            if count:
                each[_KEY] = before[:start] + type(before)(own)  # writes: what the release recorded without a graph


def _record_of(function: Any) -> _Record | None:
    """What the models that run now record of this function; None if they record no router logits."""
    capturing = sys.modules.get(_CAPTURING)
    if capturing is not None:
        variable = capturing._active_collector
        collected = variable.get()  # waits: for nothing, a ContextVar
        if type(collected) is not dict or type(collected.get(_KEY)) is not list:
            return None
        return _Record([collected], functools.partial(_collecting, variable))
    layer = getattr(getattr(function, "func", function), "__self__", None)  # the release's partial of `__call__`
    recorders = list(_recorders(layer)) if isinstance(layer, torch.nn.Module) else []
    if not recorders:
        return None
    sinks: list[Any] = []
    places = []
    for module, index, collected in recorders:
        if not any(each is collected for each in sinks):
            sinks.append(collected)
        places.append((module, index, next(number for number, each in enumerate(sinks) if each is collected)))
    return _Record(sinks, functools.partial(_hooked, places, len(sinks)))


def _recorders(layer: torch.nn.Module) -> Iterator[tuple[Any, int, Any]]:
    """Modules of the layer whose router logits are recorded now: the module, the output's index, where to."""
    generic = vars(sys.modules[_GENERIC])
    for module in layer.modules():
        forward = vars(module).get("forward")
        # known: transformers' own closure, by the module that its code is in and by what it closes over
        while isinstance(forward, FunctionType) and forward.__globals__ is generic:
            names = forward.__code__.co_freevars  # known: as above
            if not set(names) >= _CELLS:
                break
            cells = dict(zip(names, forward.__closure__ or (), strict=True))
            if cells["key"].cell_contents == _KEY:
                yield module, cells["index"].cell_contents, cells["collected_outputs"].cell_contents
            forward = cells["orig_forward"].cell_contents


@contextlib.contextmanager
def _collecting(variable: Any) -> Iterator[list[list[Any]]]:
    """A collector for the run in the backward pass, in the thread that runs it."""
    found: list[Any] = []
    token = variable.set({_KEY: found})
    try:
        yield [found]
    finally:
        variable.reset(token)


@contextlib.contextmanager
def _hooked(places: list[tuple[Any, int, int]], count: int) -> Iterator[list[list[Any]]]:
    """The same where the model's own recording is over: hooks, for this run."""
    found: list[list[Any]] = [[] for _ in range(count)]

    def hook(index: int, number: int, _module: Any, _args: Any, output: Any) -> None:
        logits = output[index] if isinstance(output, tuple) else output
        if logits is not None:
            found[number].append(logits)

    with contextlib.ExitStack() as stack:
        for module, index, number in places:
            # writes: a hook, which is removed below
            handle = module.register_forward_hook(functools.partial(hook, index, number), prepend=True)
            stack.callback(handle.remove)
        yield found
