"""Whether the hooks of a module or parameter are the releases' own: a user's hook may change a gradient itself."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from . import _released

OF_GRADIENTS = ("_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", *OF_GRADIENTS)
_KNOWN = ("torch", "megatron", "transformer_engine", "transformers", "slime", "slime_plugins", "swift", "rlhf_patches")


def others(*owners: Any) -> str:
    """The first hook that is a user's, of these modules and parameters; empty if there is none."""
    for owner in owners:
        for hook in of(owner, kinds=_HOOKS):
            while isinstance(hook, functools.partial):
                hook = hook.func
            if not _released.is_released(hook, _KNOWN):  # known: from attributes that no decorator copies
                return f"a hook of {type(owner).__name__}"
    return ""


def of(*owners: Any, kinds: tuple[str, ...] = OF_GRADIENTS) -> Iterator[Any]:
    """The hooks of modules, parameters and other tensors; by default those of gradients."""
    for owner in owners:
        attributes, owner_class = vars(owner), type(owner)
        for kind in kinds:
            # A module without this attribute would search its parameters, buffers and modules for it.
            if hooks := attributes.get(kind) or (hasattr(owner_class, kind) and getattr(owner, kind)):
                yield from hooks.values()
