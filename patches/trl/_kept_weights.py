"""The weights that a trainer trains, while a copy of them in 16 bits generates: for trl-continuous-batching-weights.

The release casts the model itself. `Kept` puts other parameters into the model before the cast, which share the trained
ones' memory until then, and puts the trained ones back after the generation. They are never written to, so their
gradients, the optimizer's references and DDP's hooks stay as they are. (A cast parameter gets a new node in autograd's
graph, without DDP's hook.)
"""

from __future__ import annotations

import sys
from typing import Any

from .. import _float32_buffers, _released

_NAME = "trl-continuous-batching-weights"
_PACKAGES = ("torch", "transformers", "peft", "trl", "accelerate")


class Kept:
    """A context in which `cast` may be called; when it ends, the model has its own weights again."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._parameters: list[tuple[Any, str, Any]] = []
        self._buffers: list[tuple[Any, str, Any, Any, int]] = []

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, parameter in self._parameters:
            owner._parameters[name] = parameter  # writes: this is the repair
        for owner, name, buffer, cast, version in self._buffers:
            if owner._buffers.get(name) is cast and cast._version == version:  # else the generation has changed it
                owner._buffers[name] = buffer  # writes: this is the repair
        self._parameters, self._buffers = [], []

    def cast(self, model: Any, dtype: Any) -> None:
        """Call ``model.to(dtype)``; what that would round is put back when this context ends."""
        parameters, buffers = _rounded(model, dtype)
        why = _other(self._trainer, model, parameters) if parameters or buffers else ""
        if why or not (parameters or buffers):
            if why:
                _released.stays(_NAME, why, "the cast of the trained weights")
            model.to(dtype)  # writes: as the release does
            return
        rotary = {id(buffer) for _, _, buffer in _float32_buffers.known(model)}
        self._parameters = parameters
        _put_aliases(parameters)
        model.to(dtype)  # writes: as the release does, to the aliases
        for owner, name, buffer in buffers:
            if id(buffer) in rotary:
                owner._buffers[name] = buffer  # writes: this is the repair
            else:
                cast = owner._buffers[name]
                self._buffers.append((owner, name, buffer, cast, cast._version))


def is_rounded(trainer: Any, model: Any, dtype: Any) -> bool | None:
    """Whether a cast of ``model`` to ``dtype`` would round its weights; None if they are left as released."""
    parameters, buffers = _rounded(model, dtype)
    if not parameters and not buffers:
        return False
    return None if _other(trainer, model, parameters) else True


_Found = list[tuple[Any, str, Any]]


def _rounded(model: Any, dtype: Any) -> tuple[_Found, _Found]:
    """Each parameter and each buffer that a cast to ``dtype`` changes, with its module and its name there."""
    modules = list(model.modules())
    return (
        [found for owner in modules for found in _of_another(owner, owner._parameters, dtype)],
        [found for owner in modules for found in _of_another(owner, owner._buffers, dtype)],
    )


def _of_another(owner: Any, tensors: dict[str, Any], dtype: Any) -> _Found:
    return [
        (owner, name, each)
        for name, each in tensors.items()
        if each is not None and each.is_floating_point() and each.dtype != dtype
    ]


def _other(trainer: Any, model: Any, parameters: _Found) -> str:
    """Why it is not known that the trained weights can be put back; empty if it is."""
    kind = trainer.accelerator.distributed_type.value
    if kind != "NO" and not kind.startswith("MULTI_"):  # DeepSpeed and FSDP keep references to what they partition
        return f"the model is {kind}'s"
    if not _released.is_released(model.to, _PACKAGES):
        return f"{type(model).__name__}.to is not the release's own"
    if getattr(model, "_cached_continuous_batching_manager", None) is not None:
        return "a manager of continuous batching that is kept may have captured the weights"  # in CUDA graphs
    torch = sys.modules["torch"]
    for module in model.modules():
        # A module of another package, or with a cast of its own such as torch's RNNs, may hold its weights elsewhere.
        if not _released.is_released(module, _PACKAGES) or type(module)._apply is not torch.nn.Module._apply:
            return f"{type(module).__name__} is not torch's, transformers' or PEFT's own, or casts itself"
    for _, name, each in parameters:
        if type(each) is not torch.nn.Parameter or type(each.data) is not torch.Tensor or each.is_meta:
            return f"{name} is a {type(each).__name__} of another kind"
    return ""


def _put_aliases(parameters: _Found) -> None:
    """Put another parameter of the same memory in the place of each; weights that are tied stay tied."""
    parameter_type = sys.modules["torch"].nn.Parameter
    aliases: dict[int, Any] = {}
    for owner, name, each in parameters:
        if id(each) not in aliases:
            aliases[id(each)] = parameter_type(each.detach(), requires_grad=each.requires_grad)
        owner._parameters[name] = aliases[id(each)]  # writes: until the generation has ended
