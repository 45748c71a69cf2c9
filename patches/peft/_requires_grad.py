"""Which parameters are trainable, remembered and put back: around functions of PEFT that switch it on the way."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch

import rlhf_patches


class Remembered:
    """``requires_grad`` of parameters, as it is when this is made; of those behind what FSDP shows in their place."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        flat: dict[int, dict[int, Any]] = {}
        self._before = [(one, one.requires_grad) for one in (_behind(each, flat) for each in parameters)]

    def restore(self) -> bool:
        """Of those that can be switched: FSDP shows views in place of parameters at times, which cannot.

        Returns:
            Whether any had been switched.
        """
        switched = [each for each in self._before if each[0].requires_grad != each[1] and each[0].is_leaf]
        for parameter, before in switched:
            parameter.requires_grad_(before)  # writes: this is the repair
        return bool(switched)


def _behind(tensor: Any, flat: dict[int, dict[int, Any]]) -> Any:
    """The parameter in whose place FSDP (the first) shows a view of its flat one, which knows it; else the tensor.

    Args:
        tensor: what is registered as a parameter.
        flat: of each flat parameter that has been met, by its id: parameters by the ids of their views.
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
    """Around ``BaseTuner.inject_adapter``: what was there before stays as trainable as it was."""
    model, adapter = args[:2]
    if adapter in tuner.active_adapters:
        # The first adapter, which freezes the base model; or the only one of a tuner of its own, which replaces the
        # active ones (`inject_adapter_in_model`).
        rlhf_patches.decided("peft-adapter-freeze", False)
        return wrapped(*args, **kwargs)
    own = _of_adapter(model, adapter)
    before = Remembered(parameter for parameter in model.parameters() if id(parameter) not in own)
    try:
        return wrapped(*args, **kwargs)
    finally:
        rlhf_patches.decided("peft-adapter-freeze", before.restore())


def _of_adapter(model: torch.nn.Module, adapter: str) -> set[int]:
    """The ids of an adapter's parameters, of which some tuners have made some before `inject_adapter` (UniLoRA).

    They lie in containers of the tuner's layers, each adapter under its name. The name alone says nothing: layers of
    the base model may be called the same.
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
    """Around ``PeftModel.disable_adapter``: what was trainable before is afterwards, and nothing else.

    Of layers that were disabled already nothing is remembered: their flags are those of whoever disabled them.
    """
    kinds = _adapter_layers()
    before = [
        (layer, _active(layer), Remembered(_of_adapters(layer)))
        for layer in model.modules()
        if isinstance(layer, kinds) and not layer.disable_adapters
    ]
    try:
        with contextmanager(wrapped)(*args, **kwargs) as nothing:
            yield nothing
    finally:
        # A layer whose adapter has been switched within is left: that makes others trainable.
        restored = [flags.restore() for layer, active, flags in before if _active(layer) == active]
        rlhf_patches.decided("peft-disable-adapter-restore", any(restored))


def _of_adapters(layer: Any) -> list[Any]:
    """A tuner layer's parameters but those of the layer that it adapts, which PEFT does not switch here."""
    return [parameter for name, parameter in layer.named_parameters() if not name.startswith("base_layer.")]


def _active(layer: Any) -> list[str]:
    """Which adapters are active; of several, or of none, it is a list."""
    return [layer.active_adapter] if isinstance(layer.active_adapter, str) else list(layer.active_adapter)


@functools.cache
def _adapter_layers() -> Any:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import other

    # PEFT before 0.16 has only the one that newer ones derive from the other.
    return BaseTunerLayer, getattr(other, "AuxiliaryTrainingWrapper", other.ModulesToSaveWrapper)


def of_leaves(wrapped: Callable[..., Any], layer: Any, args: Any, kwargs: Any) -> Any:
    """Around ``enable_adapters``: what FSDP shows in place of parameters, views of its own, is left as it is.

    The call finds other parameters there. When adapters are enabled, it is those that were frozen when they were
    disabled, so that they do not stay frozen behind the views; else empty ones, at whose flags nobody looks.
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


# writes: until the call is over, as FSDP does
def _show(owner: Any, name: str, tensor: Any) -> None:
    """As FSDP does it: among the parameters, and as an attribute, which is found first."""
    owner._parameters[name] = tensor
    if name in vars(owner):
        vars(owner)[name] = tensor


_frozen: weakref.WeakKeyDictionary[Any, dict[tuple[str, str], weakref.ref[Any]]] = weakref.WeakKeyDictionary()
"""Of layers that were disabled: the parameters that were frozen then, by the module's path in the layer and name."""
