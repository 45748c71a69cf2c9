"""Records which parameters are trainable, and restores it: around functions of PEFT that change it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch

import rlhf_patches


class Remembered:
    """``requires_grad`` of parameters at construction; for FSDP's views, of the parameters behind them."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        flat: dict[int, dict[int, Any]] = {}
        self._before = [(one, one.requires_grad) for one in (_behind(each, flat) for each in parameters)]
        self._left: set[int] = set()

    def restore(self) -> bool:
        """Restore the flags that can be set: FSDP sometimes shows views of parameters, whose flags cannot be set.

        Returns:
            Whether any flag had changed.
        """
        switched = [
            (one, flag)
            for one, flag in self._before
            if one.requires_grad != flag and one.is_leaf and id(one) not in self._left
        ]
        for parameter, before in switched:
            parameter.requires_grad_(before)  # writes: this is the repair
        return bool(switched)

    def now_trainable(self) -> set[int]:
        """The ids of the parameters that were frozen and are trainable now."""
        return {id(one) for one, flag in self._before if one.requires_grad and not flag}

    def leave(self, ids: set[int]) -> None:
        """These parameters keep their flags: other code has set them."""
        self._left |= ids


def _behind(tensor: Any, flat: dict[int, dict[int, Any]]) -> Any:
    """The parameter behind a view that FSDP1 shows, which its flat parameter knows; otherwise the tensor itself.

    Args:
        tensor: a registered parameter.
        flat: for each flat parameter seen so far, by its id: parameters by the ids of their views.
    """
    whole = tensor._base
    parameters, places = (getattr(whole, name, None) for name in ("_params", "_param_infos"))
    if parameters is None or places is None:
        return tensor
    if id(whole) not in flat:
        shown = (place[1]._parameters.get(place[0]) for place in places)
        flat[id(whole)] = {id(view): one for view, one in zip(shown, parameters, strict=True)}
    return flat[id(whole)].get(id(tensor), tensor)


def of_the_others(wrapped: Callable[..., Any], tuner: Any, args: Any, kwargs: Any) -> Any:
    """Around ``BaseTuner.inject_adapter``: existing parameters keep their ``requires_grad``."""
    model, adapter = args[:2]
    if adapter in tuner.active_adapters:
        # The first adapter, which freezes the base model; or the only one of a new tuner, which replaces the active
        # ones (`inject_adapter_in_model`).
        rlhf_patches.decided("peft-adapter-freeze", False)
        return wrapped(*args, **kwargs)
    own = _of_adapter(model, adapter)
    before = Remembered(parameter for parameter in model.parameters() if id(parameter) not in own)
    try:
        return wrapped(*args, **kwargs)
    finally:
        rlhf_patches.decided("peft-adapter-freeze", before.restore())


def _of_adapter(model: torch.nn.Module, adapter: str) -> set[int]:
    """The ids of an adapter's parameters; some tuners (UniLoRA) create some of them before `inject_adapter`.

    They are in containers of the tuner's layers, each adapter under its name. The name alone is not enough: layers of
    the base model may have the same name.
    """
    containers = (torch.nn.ModuleDict, torch.nn.ParameterDict)
    return {
        id(parameter)
        for layer in model.modules()
        if isinstance(layer, _adapter_layers())
        for container in layer.children()
        if isinstance(container, containers)
        for name, parameter in container.named_parameters()
        if name.split(".", 1)[0] == adapter
    }


def after_disabling(wrapped: Callable[..., Any], model: Any, args: Any, kwargs: Any) -> Generator[Any, None, None]:
    """Around ``PeftModel.disable_adapter``: restores the trainable parameters, and makes no others trainable.

    It records nothing for layers that were disabled already: the code that disabled them sets their flags.
    """
    kinds = _adapter_layers()
    before = [
        (layer, _active(layer), Remembered(_of_adapters(layer)))
        for layer in model.modules()
        if isinstance(layer, kinds) and not layer.disable_adapters
    ]
    by_others: set[int] = set()
    _open[id(by_others)] = by_others
    switched: Remembered | None = None
    try:
        with contextmanager(wrapped)(*args, **kwargs) as nothing:
            try:
                yield nothing
            finally:
                # Entering has frozen all: code within, not PEFT, has made these trainable.
                for _, _, flags in before:
                    flags.leave(flags.now_trainable() - by_others)
                if len(_open) > 1:
                    layers = (layer for layer in model.modules() if isinstance(layer, kinds))
                    switched = Remembered(each for layer in layers for each in _of_adapters(layer))
    finally:
        del _open[id(by_others)]
        if switched is not None:
            for each in list(_open.values()):
                each |= switched.now_trainable()
        # Skips a layer whose adapter was switched within: the switch makes other parameters trainable.
        restored = [flags.restore() for layer, active, flags in before if _active(layer) == active]
        rlhf_patches.decided("peft-disable-adapter-restore", any(restored))


_open: dict[int, set[int]] = {}
"""For each open context, the ids of the parameters that leaving another context has made trainable."""


def _of_adapters(layer: Any) -> list[Any]:
    """A tuner layer's parameters except those of its base layer, whose flags PEFT does not change here."""
    return [parameter for name, parameter in layer.named_parameters() if not name.startswith("base_layer.")]


def _active(layer: Any) -> list[str]:
    """The active adapters; PEFT has a list if there are several, or none."""
    return [layer.active_adapter] if isinstance(layer.active_adapter, str) else list(layer.active_adapter)


@functools.cache
def _adapter_layers() -> Any:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import other

    # PEFT before 0.16 has only ModulesToSaveWrapper, which later derives from AuxiliaryTrainingWrapper.
    return BaseTunerLayer, getattr(other, "AuxiliaryTrainingWrapper", other.ModulesToSaveWrapper)


def of_leaves(wrapped: Callable[..., Any], layer: Any, args: Any, kwargs: Any) -> Any:
    """Around ``enable_adapters``: does not change the views that FSDP shows instead of parameters.

    The call sees other parameters in their place. When adapters are enabled, these are the parameters that were frozen
    when the adapters were disabled, so they do not stay frozen behind the views; otherwise empty parameters, whose
    flags are never read.
    """
    enabled = bool(args[0] if args else kwargs["enabled"])
    parameters, views = {}, {}
    for path, owner in layer.named_modules():
        for name, tensor in owner._parameters.items():
            if isinstance(tensor, torch.nn.Parameter):
                parameters[path, name] = weakref.ref(tensor)
            elif tensor is not None:
                views[path, name] = owner, tensor
    if not enabled and not layer.disable_adapters:
        _frozen[layer] = parameters
    frozen = _frozen.get(layer, {}) if enabled else {}
    try:
        for place, (owner, _) in views.items():
            behind = frozen[place]() if place in frozen else None
            _show(owner, place[-1], torch.nn.Parameter(torch.empty(0)) if behind is None else behind)
        return wrapped(*args, **kwargs)
    finally:
        for place, (owner, view) in views.items():
            _show(owner, place[-1], view)


# writes: until the call returns, as FSDP does
def _show(owner: Any, name: str, tensor: Any) -> None:
    """As FSDP does: among the parameters, and as an attribute, which is looked up first."""
    owner._parameters[name] = tensor
    if name in vars(owner):
        vars(owner)[name] = tensor


_frozen: weakref.WeakKeyDictionary[Any, dict[tuple[str, str], weakref.ref[Any]]] = weakref.WeakKeyDictionary()
"""For disabled layers: the parameters that were frozen then, by the module's path in the layer and name."""
