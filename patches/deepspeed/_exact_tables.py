"""Tables of transformers' modules that are built within ``zero.Init``, such as rotary frequencies."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch

import rlhf_patches

from .. import _released

NAME = "deepspeed-zero3-rotary-init"
_OWNER = "deepspeed.runtime.zero.partition_parameters"
_PACKAGES = ("transformers", "torch", "deepspeed")  # zero.Init wraps __init__
_ORIGINAL = "_orig_torch_"
_HALF = (torch.bfloat16, torch.float16)
_FREQUENCIES = "inv_freq"
_METHODS = (staticmethod, classmethod)

_told: weakref.WeakSet[Any] = weakref.WeakSet()
"""The contexts whose bug has been reported."""
_repaired: weakref.WeakKeyDictionary[Any, list[tuple[Any, Any, Any]]] = weakref.WeakKeyDictionary()
"""By module: a table, the rounded values that it had, and the exact ones."""


def exact(context: Any, initialize: Any, module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Put the values that a module's ``__init__`` computes outside of ``zero.Init`` in place of rounded ones.

    Args:
        context: the ``zero.Init``.
        initialize: the module's ``__init__``, as it is outside of the context.
        module: it has been initialized.
        arguments: of ``initialize``, after ``self``.
        keywords: of ``initialize``.

    Returns:
        ``module``.
    """
    if context.dtype in _HALF:
        with contextlib.suppress(Exception):  # it stays as released
            if _is_model(module):
                _put_back(context, module)
            else:
                _make_exact(context, initialize, module, arguments, keywords)
    return module


def _make_exact(
    context: Any, initialize: Any, module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> None:
    tables = _tables(module)
    if not tables:
        return
    if not _is_transformers(module):
        if any(name.endswith(_FREQUENCIES) and table.dtype == context.dtype for name, table in tables.items()):
            _released.stays(NAME, f"{type(module).__name__} is not transformers' own", "the precision of its buffers")
        return
    again = _tables(_made_again(next(iter(tables.values())).device, initialize, module, arguments, keywords))
    rounded = [
        (table, again[name])
        for name, table in tables.items()
        if name in again and again[name].shape == table.shape and not _equal(again[name], table)
    ]
    types = [table.dtype for table, _ in rounded]
    for table, right in rounded:
        _repaired.setdefault(module, []).append((table, table.clone(), right.clone()))
        table.data = right  # writes: this is the repair; the buffer stays the object that it is
    # transformers 5 may compute them once more outside of the context, and copy them into what is there.
    if any(table_type == context.dtype for table_type in types) or (rounded and not _computes_again()):
        _tell(context)


def _computes_again() -> bool:
    return not sys.modules["transformers"].__version__.startswith("4.")


def _tell(context: Any) -> None:
    if context not in _told:
        _told.add(context)
        rlhf_patches.decided(NAME, True)


def _is_model(module: Any) -> bool:
    model = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return model is not None and isinstance(module, model)


def _put_back(context: Any, model: Any) -> None:
    """Put exact values back where transformers 5 has computed the rounded ones again, for all modules of a model."""
    for module in model.modules():
        for table, rounded, right in _repaired.get(module, ()):
            if torch.equal(table, rounded.to(table.dtype)):
                table.data = right.clone()  # writes: as above
                _tell(context)


def _tables(module: Any) -> dict[str, Any]:
    """What a module without parameters and submodules keeps and no checkpoint has: floating-point tensors by name.

    Its non-persistent buffers and its attributes, which may be a buffer once more.
    """
    if module._parameters or module._modules:
        return {}
    kept = {name: table for name, table in module._buffers.items() if name in module._non_persistent_buffers_set}
    kept |= {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}
    return {
        name: table
        for name, table in kept.items()
        if table is not None and table.is_floating_point() and not table.is_meta
    }


def _is_transformers(module: Any) -> bool:
    """Whether a module's classes, their functions, and the functions that it has been given are the release's own."""
    kinds = [kind for kind in type(module).__mro__ if kind not in (torch.nn.Module, object)]
    values = [value for owner in (*kinds, module) for value in vars(owner).values()]
    functions = [
        getattr(value, "__func__", value) for value in values if isinstance(value, _METHODS) or callable(value)
    ]
    functions += _of_kinds(module)
    # known: a user's class has another module, and a user's function other globals
    return all(kind.__module__.startswith("transformers.") for kind in kinds) and all(
        _released.is_released(function, _PACKAGES) for function in functions if not isinstance(function, torch.Tensor)
    )


def _of_kinds(module: Any) -> list[Any]:
    """The functions, which may be a user's, that transformers has for a module's kinds of rotary embedding."""
    functions = getattr(sys.modules.get("transformers.modeling_rope_utils"), "ROPE_INIT_FUNCTIONS", {})
    kinds = getattr(module, "rope_type", None)
    return [functions[kind] for kind in (kinds.values() if isinstance(kinds, dict) else [kinds]) if kind in functions]


def _made_again(device: Any, initialize: Any, module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    kind: Any = type(module)
    made = kind.__new__(kind)
    made._ds_child_entered = True  # writes: to a module of ours, which DeepSpeed then does not partition
    state = torch.get_rng_state()
    try:
        with _torchs_own(device):
            initialize(made, *arguments, **keywords)
        if not torch.equal(torch.get_rng_state(), state):
            raise _RandomError
    finally:
        torch.set_rng_state(state)
    return made


class _RandomError(Exception):
    """A module's tables are random, so they cannot be computed again."""


@contextlib.contextmanager
def _torchs_own(device: Any) -> Iterator[None]:
    """Within it, constructors that ``zero.Init`` replaced do not round, and make tensors where it made them."""
    replaced = {
        name.removeprefix(_ORIGINAL): original
        for name, original in vars(sys.modules[_OWNER]).items()
        if name.startswith(_ORIGINAL)
    }
    wrapped = {name: getattr(torch, name) for name in replaced}
    ours = {name for name, wrapper in wrapped.items() if _released.written_in(wrapper) == _OWNER}
    try:
        for name in ours:
            construct = _refused if name == "randn" else _on(device, replaced[name])
            setattr(torch, name, construct)  # writes: the release puts its own there, and gets them back below
        yield
    finally:
        for name in ours:
            setattr(torch, name, wrapped[name])  # writes: puts the release's own back


def _on(device: Any, construct: Any) -> Any:
    def constructed(*arguments: Any, **keywords: Any) -> Any:
        if keywords.get("device") is None:
            keywords["device"] = device
        return construct(*arguments, **keywords)

    return constructed


def _refused(*_: Any, **__: Any) -> Any:
    raise _RandomError


def _equal(one: Any, other: Any) -> bool:
    return bool(one.dtype == other.dtype and torch.equal(one, other))
