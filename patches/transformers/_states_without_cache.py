"""Keys and values that later layers share, in a forward pass without a cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

import rlhf_patches

from .._released import is_released, left
from ._shared_states import Kept, with_collected, without_graph

NAME = "transformers-shared-kv-training"
_STATES = "_rlhf_patches_shared_states"
_WRAPPED = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
_FRAMEWORKS = ("transformers", "accelerate", "trl", "swift")


class States:
    """What the layers of one forward pass share: keys and values by the index of the layer that computed them.

    Not a dictionary: FSDP2 copies those among a layer's arguments.
    """

    def __init__(self, shared: set[int]) -> None:
        self.shared = shared
        self.found: dict[int, Any] = {}


class _Whole:
    """Keys or values, whichever positions are asked for: without a cache, those of the tokens are all there are."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.device = tensor.device

    def __getitem__(self, _: Any) -> torch.Tensor:
        return self.tensor


class _Layer:
    """A cache's layer, as 4.54 and 4.55 read it."""

    def __init__(self, found: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.keys, self.values = (_Whole(each) for each in found)


class _InPlaceOfACache:
    """What an attention takes keys and values from, and gives its own to. It caches nothing."""

    def __init__(self, states: States, read: int | None) -> None:
        self.states = states
        self.shared_layers = states.found  # since 4.56.0
        if read is not None:
            layer = _Layer(states.found[read])
            self.layers, self.key_cache, self.value_cache = {read: layer}, {read: layer.keys}, {read: layer.values}

    def update(self, keys: Any, values: Any, layer_idx: int, *_: Any) -> tuple[Any, Any]:
        if layer_idx in self.states.shared:
            self.states.found[layer_idx] = keys, values
        return keys, values


def layers_of(
    model: Any, layers: Iterable[Any], past_key_values: Any, options: dict[str, Any], layer: Any, attention: Any
) -> Iterable[Any]:
    """The layers; without a cache, what they share is among the options that each one gets.

    Args:
        model: the text model.
        layers: those that run.
        past_key_values: the cache.
        options: of the layers, from this call alone.
        layer: the release's class.
        attention: the release's class.
    """
    if past_key_values is not None and not model.training:
        return layers
    compiling, found = torch.compiler.is_compiling(), list(layers)
    inner = [_unwrapped(each) for each in found]
    for each in inner:
        other = _other(each, layer, compiling) or _other(getattr(each, "self_attn", None), attention, compiling)
        # Storing is a side effect, with which checkpointing cannot be compiled whole.
        if other or (compiling and model.training and each.gradient_checkpointing):
            if not compiling and getattr(model.config, "num_kv_shared_layers", None):
                left(NAME, other)
            return found
    shared = {each.self_attn.kv_shared_layer_index for each in inner if each.self_attn.is_kv_shared_layer} - {None}
    if shared:
        options[_STATES] = States(shared)  # writes: the dictionary of this call's keywords
    if not compiling:
        rlhf_patches.decided(NAME, bool(shared) and past_key_values is None)
    return found


def _unwrapped(layer: Any) -> Any:
    while True:
        inner = (getattr(layer, "_modules", {}).get(name) for name in _WRAPPED)
        found = next((each for each in inner if each is not None), None)
        if found is None:
            return layer
        layer = found


def _other(module: Any, released: Any, compiling: bool) -> str:
    """Whose forward is not the release's, by name; empty if it is. What is compiled can compare identities alone."""
    if getattr(type(module), "forward", None) is not released.forward:
        return f"{type(module).__name__}.forward"
    own = vars(module).get("forward")
    if compiling:
        return "" if own is None else f"{type(module).__name__}.forward"
    if is_released(type(module).forward) and (own is None or is_released(own, _FRAMEWORKS)):
        return ""
    return f"{type(module).__name__}.forward"


def attention_of(layer: Any, options: dict[str, Any]) -> Callable[..., Any]:
    """The layer's attention; if there is something to share, with that in a cache's place."""
    states = options.pop(_STATES, None)  # writes: the dictionary of this call's keywords
    if states is None:
        return layer.self_attn  # type: ignore[no-any-return]
    return functools.partial(_attend, layer, states)


def _attend(layer: Any, states: States, /, **given: Any) -> Any:
    attention = layer.self_attn
    name = "past_key_values" if "past_key_values" in given else "past_key_value"  # until 4.55
    read = attention.kv_shared_layer_index if attention.is_kv_shared_layer else None
    if given[name] is not None or (read is not None and read not in states.found):
        return attention(**given)
    sharing = functools.partial(attention, **{**given, name: _InPlaceOfACache(states, read)})
    if attention.layer_idx in states.shared:
        if torch.is_grad_enabled():
            if type(states.found.get(attention.layer_idx)) is Kept:
                return with_collected(sharing, states.found)
        elif layer.training and layer.gradient_checkpointing:
            return without_graph(sharing, states.found)
    return sharing()
