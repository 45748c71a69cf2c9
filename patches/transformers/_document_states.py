"""Recurrent layers on packed documents: each document starts from the states that it has alone."""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import rlhf_patches

from .._released import is_released

_Bounds = list[list[int]]
"""For each row, where its documents start, and its number of tokens."""


@dataclass
class _Packed:
    """The documents of the layer that this thread computes."""

    patch: str
    positions: torch.Tensor
    """Shape (rows, tokens)."""
    bounds: _Bounds
    occurs: bool | None = None
    """Whether documents would not be separate as released; None if the layer's calls were not seen."""

    def fits(self, rows: int, tokens: int) -> bool:
        """Whether these are the documents of a tensor of this size: a user's code may have split the tokens."""
        return tokens == self.positions.shape[1] and self.positions.shape[0] in (1, rows)


class _Current(threading.local):
    """The documents of the current layer, and what was last read, which the later layers of a forward share."""

    packed: _Packed | None = None
    positions: weakref.ref[torch.Tensor] | None = None
    version: int = -1
    layer: int = -1
    bounds: _Bounds | None = None


_CURRENT = _Current()
_FUNCTIONS = (
    *("causal_conv1d_fn", "conv1d", "conv", "chunk_gated_delta_rule", "torch_chunk_gated_delta_rule"),
    *("mamba2_split_conv1d_scan_combined", "mamba2_chunk_scan"),
)
# Kernels, what wraps them, and layers that stand for a convolution.
_KNOWN = ("transformers", "fla", "causal_conv1d", "mamba_ssm", "kernels", "triton", "torch", "peft")


def apart(layer: Callable[..., Any], position_ids: Any, patch: str) -> Callable[..., Any]:
    """The layer, or a call of it in which `convolution`, `recurrence` and the others below know its documents.

    A decoder layer that is computed again calls this again. A layer that is computed again by itself does not, so a
    wrapped one is called as released. So is it in compiled and traced code, which cannot depend on positions.
    """
    if torch.compiler.is_compiling() or not _is_own(layer):
        return layer
    bounds = _of(position_ids, getattr(layer, "layer_idx", None))
    if not bounds:
        if bounds is not None:
            rlhf_patches.decided(patch, False)
        return layer
    positions = position_ids[0] if position_ids.ndim == 3 else position_ids
    return functools.partial(_within, _Packed(patch, positions, bounds), layer)


def _is_own(layer: Any) -> bool:
    """Whether the layer and its functions are the release's: no wrapper, no user's forward, no user's function."""
    if "forward" in vars(layer) or not is_released(type(layer).forward, ("transformers",)):
        return False
    module = sys.modules[next(each for each in type(layer).__mro__ if "forward" in vars(each)).__module__]
    return all(
        _is_known(found)
        for name in _FUNCTIONS
        for found in (getattr(layer, name, None), getattr(module, name, None))
        if found is not None
    )


def _is_known(function: Any) -> bool:
    if isinstance(function, torch.nn.Module):  # `kernels` assigns a forward, also its own of the release's function
        function = vars(function).get("forward", type(function).forward)
    return is_released(function, _KNOWN)


def _within(packed: _Packed, layer: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    if any(kwargs.get(name) is not None for name in _CACHES):
        return layer(*args, **kwargs)
    before, _CURRENT.packed = _CURRENT.packed, packed
    try:
        return layer(*args, **kwargs)
    finally:
        _CURRENT.packed = before
        if packed.occurs is not None:
            rlhf_patches.decided(packed.patch, packed.occurs)


_CACHES = ("cache_params", "past_key_values", "past_key_value", "cache", "attention_mask")


def _of(position_ids: Any, layer: int | None) -> _Bounds | None:
    """The documents' bounds, empty if rows are not packed; None if the positions are others, or cannot be read.

    Attention's masks have read these positions from the device in the same forward. This reads them once for the layers
    of a forward, whose numbers rise: a buffer may have other positions in the next one, and not all writes count.
    """
    if position_ids is None:
        return []
    if _captured() or type(position_ids) is not torch.Tensor or position_ids.is_meta:
        return None
    if position_ids.is_inference() or layer is None:  # an inference tensor counts no writes
        return _read(position_ids)
    last, version = None if _CURRENT.positions is None else _CURRENT.positions(), position_ids._version
    if last is not position_ids or _CURRENT.version != version or layer <= _CURRENT.layer:
        _CURRENT.bounds = _read(position_ids)
        _CURRENT.positions, _CURRENT.version = weakref.ref(position_ids), version
    _CURRENT.layer = layer
    return _CURRENT.bounds


def _captured() -> bool:
    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    return bool(capturing or torch.jit.is_tracing())


def _read(position_ids: torch.Tensor) -> _Bounds | None:
    planes = position_ids if position_ids.ndim == 3 else position_ids[None]  # a plane each for time, height and width
    if planes.ndim != 3:
        return None
    rows = planes[0]
    if rows.shape[1] < 2:  # a token that is generated
        return []
    starts = rows == 0
    rises = rows[:, 1:] == rows[:, :-1] + 1
    try:  # vmap and make_fx have no values
        if rises.all():
            return []
        if not (starts[:, 0].all() & (starts[:, 1:] | rises).all() & (planes == rows).all()):
            return None
        bounds: _Bounds = [[] for _ in rows]
        for row, place in starts.nonzero().tolist():
            bounds[row].append(place)
    except RuntimeError:
        return None
    padding = [_padding(places, rows.shape[1]) for places in bounds]
    if all(len(places) <= 1 + count for places, count in zip(bounds, padding, strict=True)):
        return []  # a document in each row, and padding
    return [
        [*(places[: 1 - count] if count > 1 else places), rows.shape[1]]
        for places, count in zip(bounds, padding, strict=True)
    ]


def _padding(starts: list[int], tokens: int) -> int:
    """How many tokens at position 0 follow each other at a row's end: padding, which is one document, if above 1."""
    count = 0
    while count < len(starts) and starts[-1 - count] == tokens - 1 - count:
        count += 1
    return count if count > 1 else 0


def convolution(function: Callable[..., Any], size: int) -> Callable[..., Any]:
    """The causal convolution of states, shape (rows, channels, tokens), with zeros before each document.

    `size` is the number of tokens that it reads for each output.
    """
    packed = _packed()
    return function if packed is None else functools.partial(_spread, packed, function, size)


def _packed() -> _Packed | None:
    return None if torch.compiler.is_compiling() else _CURRENT.packed


def _spread(packed: _Packed, function: Callable[..., Any], size: int, /, *args: Any, **kwargs: Any) -> Any:
    """One call, as released, with zeros between the documents.

    One call for each document would differ in number between ranks, and ZeRO-3 gathers a module's weights in each.
    """
    states = kwargs["x"] if "x" in kwargs else args[0]
    rows, channels, tokens = states.shape
    # known: with seq_idx the kernel keeps documents apart.
    kernel = kwargs.get("seq_idx") is not None
    if not packed.fits(rows, tokens) or kernel:
        packed.occurs = False if kernel and packed.occurs is None else packed.occurs
        return function(*args, **kwargs)
    last = torch.tensor([[len(bounds) - 2] for bounds in packed.bounds], device=packed.positions.device)
    number = ((packed.positions == 0).cumsum(-1) - 1).minimum(last)  # padding belongs to one document
    place = torch.arange(tokens, device=number.device) + (size - 1) * number
    place = place[:, None].expand(rows, channels, tokens)
    longest = tokens + (size - 1) * max(len(bounds) - 2 for bounds in packed.bounds)
    spread = states.new_zeros(rows, channels, longest).scatter(2, place, states)
    found = function(**{**kwargs, "x": spread}) if "x" in kwargs else function(spread, *args[1:], **kwargs)
    packed.occurs = True
    return found.gather(2, place)


def recurrence(function: Callable[..., Any]) -> Callable[..., Any]:
    """The gated delta rule of queries, keys and values, shape (rows, tokens, ...), each document by itself."""
    return _each(function, (0, 1, 2))


def scan(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mamba-2's scan of states, step sizes, A, B and C, each document by itself; A alone has no tokens."""
    return _each(function, (0, 1, 3, 4))


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mamba-2's convolution and scan of projected states, shape (rows, tokens, ...), each document by itself.

    Without the kernel the function returns None, and the layer goes on with the other two.
    """
    return _each(function, (0,))


_GATES = ("g", "beta")
_STATES = ("initial_state", "initial_states", "return_final_states")


def _each(function: Callable[..., Any], sequences: tuple[int, ...]) -> Callable[..., Any]:
    packed = _packed()
    return function if packed is None else functools.partial(_one_by_one, packed, function, sequences)


def _one_by_one(
    packed: _Packed, function: Callable[..., Any], sequences: tuple[int, ...], /, *args: Any, **kwargs: Any
) -> Any:
    """`function` of each document; `sequences` are the positional arguments that have tokens."""
    rows, tokens = args[0].shape[:2]
    # known: with cu_seqlens or seq_idx a kernel keeps documents apart. Before 5.15 the function in PyTorch ignores
    # cu_seqlens; since then a decorator hides which of both it is.
    lengths = kwargs.get("cu_seqlens") is not None and not _is_plain(function)
    kernel = lengths or kwargs.get("seq_idx") is not None
    more = any(kwargs.get(name) is not None and kwargs[name] is not False for name in _STATES)
    if not packed.fits(rows, tokens) or kernel or more:
        packed.occurs = False if kernel and packed.occurs is None else packed.occurs
        return function(*args, **kwargs)
    gates = {name: kwargs.pop(name) for name in _GATES if name in kwargs}
    kwargs.pop("cu_seqlens", None)
    whole, found = [], None
    for row in range(rows):
        parts = []
        for start, end in itertools.pairwise(packed.bounds[row if len(packed.bounds) > 1 else 0]):
            place = (slice(row, row + 1), slice(start, end))
            given = (each[place] if number in sequences else each for number, each in enumerate(args))
            found = function(*given, **{name: each[place] for name, each in gates.items()}, **kwargs)
            if found is None:
                return None
            parts.append(found[0] if isinstance(found, tuple) else found)
        whole.append(torch.cat(parts, dim=1))
    packed.occurs = True
    states = torch.cat(whole)
    return (states, None) if isinstance(found, tuple) else states  # without a cache nobody reads a final state


def _is_plain(function: Any) -> bool:
    return not hasattr(function, "__wrapped__") and is_released(function, ("transformers",))
