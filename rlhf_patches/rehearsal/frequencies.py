"""Rotary embeddings: their frequencies are not those of the configuration rounded to half precision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .relation import Relation, Verdict

NAME = "rotary frequencies"
_ROUNDED = 1e-6
"""Relative, of float32; bfloat16 rounds by up to 4e-3."""
_TOKENS = 1000
_BY_LENGTH = ("dynamic", "longrope")


def relation(model: torch.nn.Module) -> Relation | None:
    """Compare transformers' rotary embeddings with new ones of the same configuration; None if there are none.

    Frequencies that differ and are not rounded are not compared: a user may have changed them or the configuration.
    """
    compared, worst, angle, where = 0, 0.0, 0.0, ""
    for module in model.modules():
        for name, found, exact in _of(module):
            off = (found.double().cpu() - exact.double()).abs()
            relative = float((off / exact.double().abs().clamp_min(1e-12)).max())
            if relative > _ROUNDED and not _is_rounded(found):
                continue
            compared += 1
            if relative > worst:
                worst, angle = relative, float(off.max()) * _TOKENS
                where = f"{name} of {type(module).__name__} ({str(found.dtype).removeprefix('torch.')})"
    if not compared:
        return None
    if worst <= _ROUNDED:
        return Relation(NAME, Verdict.HOLDS, f"{worst:.0e}")
    text = f"{where} is rounded; between tokens {_TOKENS:,} apart an angle is off by up to {angle:.2g} rad"
    return Relation(NAME, Verdict.DEVIATES, f"{worst:.0e}", text)


def _of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield a module's frequencies by name, with exact ones; nothing if it is not transformers' own."""
    own = [name for name in module._buffers if name.endswith("inv_freq") and name in module._non_persistent_buffers_set]
    config = getattr(module, "config", None)
    if not own or config is None or not type(module).__module__.startswith("transformers.models."):
        return
    kind: Any = type(module)
    try:
        with torch.device("cpu"), torch.random.fork_rng(devices=()):
            exact = kind(config)
    except Exception:  # it is made of more than its configuration
        return
    for name in own:
        found, wanted = module._buffers[name], exact._buffers.get(name)
        if found is None or wanted is None or found.shape != wanted.shape or found.is_meta:
            continue
        if "original" in name or _rope_type(module, name) not in _BY_LENGTH:  # a forward pass changes these
            yield name, found, wanted


def _rope_type(module: torch.nn.Module, name: str) -> str:
    """Of these frequencies: some modules have a table for each type of layer."""
    kinds: Any = getattr(module, "rope_type", "")
    return str(kinds.get(name.removesuffix("_inv_freq"), "") if isinstance(kinds, dict) else kinds)


def _is_rounded(found: torch.Tensor) -> bool:
    """Whether bfloat16 or float16 represents each of them."""
    return any(torch.equal(found, found.to(half).to(found.dtype)) for half in (torch.bfloat16, torch.float16))
