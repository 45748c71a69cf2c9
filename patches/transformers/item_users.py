"""Whether code that a loss may come from knows of the number of items: read from code objects, nothing is run."""

from __future__ import annotations

import dis
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

_ITEMS = "num_items_in_batch"
_NAMES = {_ITEMS, "loss_function"}  # the second is how transformers' models reach their loss
# Code of these is followed where it is a model's or a loss; the rest of them computes no losses.
_LIBRARIES = ("torch", "accelerate", "numpy", "deepspeed", "transformers")
_OF_LOSSES = ("transformers.models.", "transformers.loss.", "transformers.modeling_layers")
_CALLED = ("__init__", "__call__", "forward", "apply")  # of a class that is used
_MOST_FUNCTIONS = 2000

_found: weakref.WeakKeyDictionary[torch.nn.Module, dict[Any, bool]] = weakref.WeakKeyDictionary()


def may_use(model: torch.nn.Module, function: Callable[..., Any] | None = None) -> bool:
    """Whether code that the forward of a model, or a function, may reach refers to the number of items.

    To pass ``**kwargs`` on is no use of it: the code that takes it out of them has its name.
    """
    known = _found.setdefault(model, {})
    if function not in known:
        known[function] = _reaches_items([*_forwards(model), function])
    return known[function]


def may_give(trainer: Any, model: torch.nn.Module) -> bool:
    """Whether a trainer's own ``compute_loss`` may use the number of items, or give it to the model."""
    function = _plain(trainer.compute_loss)
    passes_all = function is None or bool(function.__code__.co_flags & inspect.CO_VARKEYWORDS)
    return (passes_all or names(trainer, _ITEMS)) and may_use(model, function)


def names(trainer: Any, wanted: str) -> bool:
    """Whether a trainer's own ``compute_loss``, or methods that it uses, refer to a name that ends so."""
    function = _plain(trainer.compute_loss)
    kind: Any = type(trainer)
    return function is None or _names(kind, function, wanted)


@functools.cache
def _names(kind: Any, function: FunctionType, wanted: str) -> bool:
    pending, seen = [function], set[FunctionType]()
    while pending:
        function = pending.pop()
        if function in seen or not _is_followed(function):
            continue
        seen.add(function)
        used = references(function.__code__)
        if any(name.endswith(wanted) for name in used):
            return True
        methods = (_plain(vars(each).get(name)) for name in used for each in kind.__mro__)
        pending += [method for method in methods if method is not None]
    return False


@functools.cache
def references(code: CodeType) -> frozenset[str]:
    """What code refers to: globals, attributes, texts and variables. A parameter alone is not referred to."""
    found = {*code.co_names, *code.co_freevars, *(each for each in code.co_consts if isinstance(each, str))}
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith("LOAD_FAST"):  # two at once, on some Pythons
            found.update(instruction.argval if isinstance(instruction.argval, tuple) else [instruction.argval])
    return frozenset(found.union(*(references(each) for each in code.co_consts if isinstance(each, CodeType))))


def _forwards(model: torch.nn.Module) -> Iterator[Any]:
    """The methods of a model's modules, and whatever else is called that they hold."""
    for module in {type(module): module for module in model.modules()}.values():
        yield from (value for value in vars(module).values() if callable(value))
        for kind in type(module).__mro__:
            yield from (value for value in vars(kind).values() if isinstance(value, FunctionType))


def _reaches_items(pending: list[Any]) -> bool:
    seen: set[CodeType] = set()
    while pending:
        for function in _called(pending.pop()):
            if function.__code__ in seen or not _is_followed(function):
                continue
            if references(function.__code__) & _NAMES or len(seen) > _MOST_FUNCTIONS:
                return True
            seen.add(function.__code__)
            pending += _reached(function)
    return False


def _called(value: Any) -> Iterator[FunctionType]:
    """The Python functions that a call of something begins with."""
    if isinstance(value, functools.partial):
        for each in (value.func, *value.args, *value.keywords.values()):
            yield from _called(each)
    elif inspect.isclass(value) or (callable(value) and _plain(value) is None):
        kind = value if inspect.isclass(value) else type(value)
        methods = (_plain(vars(each).get(name)) for each in kind.__mro__ for name in _CALLED)
        yield from (method for method in methods if method is not None)
    elif (function := _plain(value)) is not None:
        yield function


def _plain(value: Any) -> FunctionType | None:
    if isinstance(value, (staticmethod, classmethod, MethodType)):
        value = value.__func__
    value = inspect.unwrap(value) if callable(value) else value
    return value if isinstance(value, FunctionType) else None


def _is_followed(function: FunctionType) -> bool:
    module = str(function.__module__)
    return module.partition(".")[0] not in _LIBRARIES or module.startswith(_OF_LOSSES)


def _reached(function: FunctionType) -> Iterator[Any]:
    """What a function finds in its module or its closure, under a name that it uses."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # empty
            continue
    yield from (function.__globals__.get(name) for name in references(function.__code__))
