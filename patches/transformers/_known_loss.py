"""Whether the code that computes a loss is known by identity: transformers' own, not replaced or wrapped."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Iterable, Iterator, Set
from operator import attrgetter, is_
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.nn import functional
from torch.nn.modules import module as torch_module

from .. import _hooks as _all_hooks

MODELS = ("transformers", "liger_kernel", "trl")
"""The packages whose forwards divide by the tensor ``num_items_in_batch`` itself, or do not use it."""
_WRAPPERS = ("torch", "torch_xla", "deepspeed", "peft")
_WRAPPED = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_model", "model")
# Packages whose modules compute no losses, or transformers' own.
_LIBRARIES = (*MODELS, *_WRAPPERS, "rlhf_patches", "accelerate", "bitsandbytes", "torchao", "timm")
_PYTHON_S = os.path.dirname(os.__file__)
HELPERS = (*_LIBRARIES, *sys.stdlib_module_names, "typing_extensions", "packaging", "numpy", "scipy", "einops")
_READING = (*_LIBRARIES, "wandb")
"""Packages whose gradient hooks change no gradient, or are a wrapper's own."""

_COMPILED = ("__compiled_fn_", "__resume_at_")
"""Names that torch.compile puts into the globals of a function, and of the losses' module."""
_OF_ANY_CLASS = (
    "__init__",
    "__dict__",
    "__weakref__",
    "config_class",
    "__firstlineno__",
    "__static_attributes__",
    "__annotate_func__",
)
_BY_A_CONTEXT = contextlib.ContextDecorator.__call__.__code__.co_consts
"""Among them the code of a function that a context manager decorates, which may replace operations within it."""
_PLAIN = (str, int, float, bool, type(None), tuple, list, dict, set)

# known here: functions and classes are known by their own module and identity; a name is only looked up in the globals
# of a known function, to find a user's replacement.


def author(function: Any) -> str:
    """The package that owns the code of a function; empty if a wrapper around it is of no known library."""
    packages = [_package(each) for each in _layers(function)]
    return packages[-1] if packages and all(each in HELPERS for each in packages[:-1]) else ""


def author_of_forward(model: Any) -> str:
    return author(getattr(model, "forward", None))


def unwrapped(model: Any) -> Any:
    """The model within wrappers. Only reads: accelerate's ``unwrap_model`` assigns to a compiled model."""
    while author_of_forward(model) in _WRAPPERS:
        children = dict(model.named_children())
        inner = next((children[name] for name in _WRAPPED if name in children), None)
        if inner is None:
            break
        model = inner
    return model


def unknown(model: Any) -> str:
    """The part of the code for a model's loss that is of no known library; empty if all code is known.

    Args:
        model: with its wrappers.
    """
    try:
        return next(_unknown(model), "")
    except Exception as error:  # an unforeseen model may raise anything: no rank may stop here
        return f"its code cannot be read ({type(error).__name__}: {error})"


def _unknown(model: Any) -> Iterator[str]:
    inner = unwrapped(model)
    name = type(inner).__name__
    if author_of_forward(inner) not in MODELS:
        yield f"the forward of {name} is not transformers' own"
    kept = _kept.get(type(inner))
    if kept is None or not kept.is_in_use():
        _kept.pop(type(inner), None)
        yield from _unknown_code(type(inner))
        kept = _Code(type(inner))
        if all(_is_importable(each) for each in type(inner).__mro__):
            _kept[type(inner)] = kept  # it keeps no class of a user's
    if "forward" in vars(inner):
        for function in _used(inner.forward):
            yield f"{_named(function)}, which {name} uses, is not transformers' own"
    for attribute in _overridden(kept.names, inner):
        yield f"{name}.{attribute} is not transformers' own"
    base = getattr(inner, "base_model", inner)
    within = set() if base is inner else {id(each) for each in _modules(base)}
    modules, forwards = _modules(model), set()
    for part in modules:
        # The base model returns hidden states; the code that computes the loss is outside it.
        if id(part) in within:
            continue
        own, kind = vars(part), type(part)
        if "forward" in own or kind not in forwards:  # each class once
            if author_of_forward(part) not in _LIBRARIES:
                yield f"the forward of {kind.__name__} in {name} is not transformers' own"
            forwards.add(kind)
        loss = own["_loss_function"] if "_loss_function" in own else getattr(kind, "_loss_function", None)
        if loss is not None and author(loss) not in MODELS:
            yield f"the loss_function of {kind.__name__}, {_named(loss)}, is not transformers' own"
        for hook in _hooks(part):
            if author(hook) not in _LIBRARIES:
                yield f"{kind.__name__} has a forward hook, {_named(hook)}"
    for hook in (*torch_module._global_forward_hooks.values(), *torch_module._global_forward_pre_hooks.values()):
        if author(hook) not in _LIBRARIES:
            yield f"all modules have a forward hook, {_named(hook)}"
    for hook in _of_gradients(modules):
        if author(hook) not in _READING:
            yield f"a hook, {_named(hook)}, may change its gradients"


def _unknown_code(kind: type) -> Iterator[str]:
    """The functions of a model's class, of transformers' losses and of torch's, and what its forward uses."""
    for attribute in _replaced(kind):
        yield f"{kind.__name__}.{attribute} is not transformers' own"
    for function in (*_losses(), *_of_torch()):
        if author(function) not in HELPERS:
            yield f"{_named(function)} is not transformers' own"
    for function in _used(getattr(kind, "forward", None)):
        yield f"{_named(function)}, which {kind.__name__} uses, is not transformers' own"


class _Code:
    """All that `_unknown_code` has found to be known, to see sooner that none of it has been replaced since."""

    def __init__(self, kind: type) -> None:
        self._kind, self._modules = kind, _modules_of_losses()
        self._values = self._in_use()
        self._functions = [each for each in self._values if type(each) is FunctionType]
        self._codes = [*map(_CODE, self._functions)]
        known = [vars(each) for each in kind.__mro__ if _package(each) in HELPERS or each is object]
        self.names = frozenset(name for each in known for name in each)

    def is_in_use(self) -> bool:
        values = self._in_use()
        same = len(values) == len(self._values) and all(map(is_, values, self._values))
        return same and all(map(is_, map(_CODE, self._functions), self._codes))

    def _in_use(self) -> list[Any]:
        values: list[Any] = []
        for each in self._kind.__mro__:
            values += vars(each).values()
        for names in self._modules:
            values += names.values()
        values += sys.modules["transformers.loss.loss_utils"].LOSS_MAPPING.values()
        values += _of_torch()
        for layer in _layers(getattr(self._kind, "forward", None)):
            if isinstance(layer, FunctionType):
                values += map(layer.__globals__.get, layer.__code__.co_names)
        return values


_CODE = attrgetter("__code__")
_kept: dict[type, _Code] = {}
"""By class of a library: known code."""


def _is_importable(kind: type) -> bool:
    """Whether a library's module holds a class, which lives as long as the process."""
    return _package(kind) in HELPERS and getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind


def _modules(model: Any) -> list[Any]:
    """``[*model.modules()]``, sooner."""
    found = {id(model): model}
    left = [model]
    for each in left:
        for child in each._modules.values():
            if child is not None and id(child) not in found:
                found[id(child)] = child
                left.append(child)
    return left


def _modules_of_losses() -> list[dict[str, Any]]:
    """The globals of transformers' losses."""
    losses = sys.modules["transformers.loss.loss_utils"]
    modules = {id(vars(losses)): vars(losses)}
    for function in losses.LOSS_MAPPING.values():
        if isinstance(function, FunctionType) and author(function) == "transformers":
            modules[id(function.__globals__)] = function.__globals__
    return [*modules.values()]


def _losses() -> Iterator[Any]:
    """transformers' losses, and what the modules of these losses use, whatever has replaced them."""
    yield from sys.modules["transformers.loss.loss_utils"].LOSS_MAPPING.values()
    for values in _modules_of_losses():
        for name, value in list(values.items()):
            if name.startswith(("__", *_COMPILED)) or isinstance(value, (type, ModuleType)):
                continue
            if isinstance(value, FunctionType) or (callable(value) and _package(value) not in HELPERS):
                yield value


def _of_gradients(modules: list[Any]) -> Iterator[Any]:
    """The hooks that may change gradients: of all modules, of each module and of each parameter."""
    yield from torch_module._global_backward_hooks.values()
    yield from torch_module._global_backward_pre_hooks.values()
    for module in modules:
        own = vars(module)
        if own.get("_backward_hooks") or own.get("_backward_pre_hooks") or "_post_accumulate_grad_hooks" in own:
            yield from _all_hooks.of(module)
        for each in own["_parameters"].values():
            if each is not None and (each._backward_hooks or each._post_accumulate_grad_hooks):
                yield from _all_hooks.of(each)


def _of_torch() -> Iterator[Any]:
    """The losses that transformers' forwards use."""
    for kind in (torch.nn.CrossEntropyLoss, torch.nn.MSELoss, torch.nn.BCEWithLogitsLoss):
        yield kind.forward
    yield from (functional.cross_entropy, functional.mse_loss, functional.binary_cross_entropy_with_logits)


def _hooks(part: Any) -> Iterator[Any]:
    """The hooks that change a module's inputs or outputs: torch's, and accelerate's, one or several in a row."""
    own = vars(part)
    yield from own["_forward_pre_hooks"].values()
    yield from own["_forward_hooks"].values()
    hook = own.get("_hf_hook")
    if hook is None:
        return
    for each in (hook, *getattr(hook, "hooks", ())):
        yield from (type(each).pre_forward, type(each).post_forward)


def _replaced(kind: type) -> Iterator[str]:
    """Attributes of transformers' classes that a user's class or assignment to a class overrides."""
    known: set[str] = set()
    for each in reversed(kind.__mro__):
        package = _package(each)
        for name, value in list(vars(each).items()):
            if package in HELPERS or each is object:
                known.add(name)
                if not all(author(function) in HELPERS for function in _functions([value])):
                    yield name
            elif name in known and name not in _OF_ANY_CLASS and not isinstance(value, _PLAIN):
                yield name


def _overridden(names: Set[str], model: Any) -> Iterator[str]:
    """Attributes of classes that an instance overrides."""
    for name, value in list(vars(model).items()):
        if callable(value) and name in names and author(value) not in _LIBRARIES:
            yield name


def _used(function: Any) -> Iterator[Any]:
    """The objects of no known library that a forward looks up in its module: a user's loss that replaces one."""
    innermost = [each for each in _layers(function) if isinstance(each, FunctionType)][-1:]
    for each in innermost:
        for name in each.__code__.co_names:
            value = each.__globals__.get(name)
            if callable(value) and _package(value) not in HELPERS:
                yield value


def _functions(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, property):
            yield from (each for each in (value.fget,) if each is not None)
        elif isinstance(value, (staticmethod, classmethod)):
            yield value.__func__
        elif isinstance(value, FunctionType):
            yield value


def _layers(function: Any) -> Iterator[Any]:
    """The functions that a call passes through, from the outside, as ``functools.wraps`` records them."""
    for _ in range(32):
        if isinstance(function, MethodType):
            function = function.__func__
        if function is None:
            return
        yield function
        inside = getattr(function, "__dict__", {}).get("__wrapped__")
        function = function.func if isinstance(function, functools.partial) and inside is None else inside


def _package(value: Any) -> str:
    """The package of a function by its globals, which no decorator copies; of other objects by their class.

    Code that a string was compiled to is of no package: a user can run it in any module.
    """
    if isinstance(value, functools.partial):
        given = (*value.args, *value.keywords.values())
        if any(isinstance(each, (FunctionType, MethodType, functools.partial)) for each in given):
            return "a partial of several functions"
        value = value.func
    if isinstance(value, MethodType):
        value = value.__func__
    if isinstance(value, FunctionType):
        file = value.__code__.co_filename
        if file.startswith("<") and not file.startswith(("<frozen ", "<rlhf_patches ")):
            return "code from a string"
        if value.__code__ in _BY_A_CONTEXT:
            contents = [cell.cell_contents for cell in value.__closure__ or ()]
            manager = next(each for each in contents if isinstance(each, contextlib.ContextDecorator))
            return _package(getattr(manager, "func", manager))
        name = value.__globals__.get("__name__", "")
    elif isinstance(value, ModuleType):
        name = value.__name__
    elif isinstance(value, type) or inspect.isroutine(value):
        name = getattr(value, "__module__", None) or "builtins"
    else:
        name = type(value).__module__
    package = str(name).partition(".")[0]
    if package in sys.stdlib_module_names and not _is_python_s(package, value):
        return f"another {package}"
    return package


def _is_python_s(package: str, value: Any) -> bool:
    """Whether an object with a name of the standard library is in it: a user's module may be called `profile`."""
    code = getattr(value, "__code__", None)
    file = code.co_filename if isinstance(code, CodeType) else getattr(sys.modules.get(package), "__file__", None)
    if file is None or file.startswith("<frozen "):
        return True
    return file.startswith(_PYTHON_S) and "-packages" not in file


def _named(value: Any) -> str:
    return str(getattr(value, "__qualname__", None) or type(value).__name__)
