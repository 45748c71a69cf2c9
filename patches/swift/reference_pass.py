"""A reference pass that is one: what goes around ms-swift's own ``null_ref_context``.

The context itself is the release's: it disables the adapter, or switches to the reference adapter. Around it comes
what it lacks. While it is open, every module of the reference model is in eval mode: no dropout, and no activation
checkpointing, which megatron-core and transformers do for modules in training mode only. When it is left, however
that happens, every module, adapter and parameter has the flags that it had before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils import other
from torch.nn import Module

_TUNERS = (PeftModel, BaseTuner)
# peft before 0.16 has only the one that newer ones derive from the other.
_ADAPTER_LAYERS = (BaseTunerLayer, getattr(other, "AuxiliaryTrainingWrapper", other.ModulesToSaveWrapper))


def of_megatron(wrapped: Callable[..., Any], trainer: Any, args: Any, kwargs: Any) -> Generator[Any, None, None]:
    """Around ``MegatronRLHFTrainer.null_ref_context`` (3.9 and later), which yields a model a pipeline chunk."""
    with (
        _adapters_kept(trainer.peft_models),
        contextmanager(wrapped)(*args, **kwargs) as reference_models,
        _in_eval_mode(reference_models),
    ):
        yield reference_models


def of_megatron_dpo(wrapped: Callable[..., Any], trainer: Any, args: Any, kwargs: Any) -> Generator[Any, None, None]:
    """Around ``MegatronDPOTrainer.null_ref_context`` (before 3.9), which yields one model."""
    with (
        _adapters_kept([trainer.peft_model]),
        contextmanager(wrapped)(*args, **kwargs) as reference_model,
        _in_eval_mode([reference_model]),
    ):
        yield reference_model


def of_transformers(wrapped: Callable[..., Any], trainer: Any, args: Any, kwargs: Any) -> Generator[Any, None, None]:
    """Around the ``null_ref_context`` of the trainers without Megatron: the policy's own model is the reference."""
    with (
        _adapters_kept([trainer.model]),
        contextmanager(wrapped)(*args, **kwargs) as nothing,
        _in_eval_mode([trainer.model]),
    ):
        yield nothing


def _modules(models: Iterable[Module]) -> list[Module]:
    """Every module of these models, once."""
    # Module.modules() passes each module up through a generator for every level, which takes several times as long.
    found = dict.fromkeys(models)
    waiting = list(found)
    for module in waiting:
        for child in module._modules.values():
            if child is not None and child not in found:
                found[child] = None
                waiting.append(child)
    return waiting


def _set_training(module: Module, training: bool) -> None:
    if type(module).__setattr__ is Module.__setattr__:
        # torch's looks among parameters, buffers and modules first, which takes ten times as long.
        object.__setattr__(module, "training", training)
    else:
        module.training = training


@contextmanager
def _in_eval_mode(models: Iterable[Module]) -> Iterator[None]:
    """Every module of these models in eval mode; afterwards every one as it was.

    Flag by flag, not by ``model.eval()`` and ``model.train()``: that would put modules into training that were kept
    out of it (a frozen vision tower), and run what a model does in ``train`` besides (transformers exchanges kernels).
    """
    modules = _modules(models)
    flags = [module.training for module in modules]
    try:
        for module in modules:
            if module.training:
                _set_training(module, False)
        yield
    finally:
        for module, training in zip(modules, flags, strict=True):
            if module.training != training:
                _set_training(module, training)


@functools.cache
def _has_adapters(kind: type) -> bool:
    """`issubclass`, which takes its time with abstract classes such as PEFT's, remembered."""
    return issubclass(kind, (*_TUNERS, *_ADAPTER_LAYERS))


@contextmanager
def _adapters_kept(models: Iterable[Module]) -> Iterator[None]:
    """Afterwards the same adapters are active, enabled and trainable in these models, also after an exception.

    PEFT's ``disable_adapter`` and ``set_adapter`` make every parameter of the active adapter trainable when they come
    back to it, those that were frozen too.
    """
    # mypy holds that classes cannot be hashed.
    modules = [module for module in _modules(models) if _has_adapters(type(module))]  # type: ignore[arg-type]
    tuners = [(tuner, tuner.active_adapter) for tuner in modules if isinstance(tuner, _TUNERS)]
    layers = [
        (layer, layer.active_adapter, layer.disable_adapters) for layer in modules if isinstance(layer, _ADAPTER_LAYERS)
    ]
    parameters = [
        parameter
        for module in _modules(layer for layer, *_ in layers)
        for parameter in module._parameters.values()
        if parameter is not None
    ]
    trainable = [parameter.requires_grad for parameter in parameters]
    try:
        yield
    finally:
        for layer, active, disabled in layers:
            if (layer.active_adapter, layer.disable_adapters) != (active, disabled):
                layer.set_adapter(active)
                layer.enable_adapters(not disabled)
        for tuner, active in tuners:
            tuner.active_adapter = active
        for parameter, flag in zip(parameters, trainable, strict=True):
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)
