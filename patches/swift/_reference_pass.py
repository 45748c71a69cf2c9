"""A wrapper around ms-swift's own ``null_ref_context`` that makes it a proper reference pass.

The context itself is the release's: it disables the adapter, or switches to the reference adapter. The wrapper adds
what it lacks. While the context is open, every module of the reference model is in eval mode: no dropout, and no
activation checkpointing, which megatron-core and transformers do only for modules in training mode. When the context is
left, in any way, every module, adapter and parameter has its previous flags.

Contexts of one model may overlap, in one thread or in several. The flags are those before the first context, and are
restored after the last one. Until then the release's own contexts stay open too, because leaving one would switch
adapters back in the middle of another's pass.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils import other
from torch.nn import Module

_TUNERS = (PeftModel, BaseTuner)
# peft before 0.16 has only ModulesToSaveWrapper, which newer releases derive from AuxiliaryTrainingWrapper.
_ADAPTER_LAYERS = (BaseTunerLayer, getattr(other, "AuxiliaryTrainingWrapper", other.ModulesToSaveWrapper))


def of_megatron(wrapped: Callable[..., Any], trainer: Any, args: Any, kwargs: Any) -> Generator[Any, None, None]:
    """Wrap ``MegatronRLHFTrainer.null_ref_context`` (3.9 and later), which yields one model per pipeline chunk."""
    own = contextmanager(wrapped)(*args, **kwargs)
    with _reference_pass(trainer.peft_models, own, lambda reference_models: reference_models) as reference_models:
        yield reference_models


def of_megatron_dpo(wrapped: Callable[..., Any], trainer: Any, args: Any, kwargs: Any) -> Generator[Any, None, None]:
    """Wrap ``MegatronDPOTrainer.null_ref_context`` (before 3.9), which yields one model."""
    own = contextmanager(wrapped)(*args, **kwargs)
    with _reference_pass([trainer.peft_model], own, lambda reference_model: [reference_model]) as reference_model:
        yield reference_model


def of_transformers(wrapped: Callable[..., Any], trainer: Any, args: Any, kwargs: Any) -> Generator[Any, None, None]:
    """Wrap ``null_ref_context`` of the trainers without Megatron: the policy's own model is the reference model.

    The flag of that model itself does not change: in the context, GRPO's trainer uses ``self.model.training`` to choose
    between the batch size of training and that of evaluation. PEFT's model does not read the flag, and wrappers (FSDP,
    torch.compile) may show their flag as that model's.
    """
    outermost = [module for module in _modules([trainer.model]) if isinstance(module, PeftModel)] or [trainer.model]
    below = [child for model in outermost for child in model.children()]
    own = contextmanager(wrapped)(*args, **kwargs)
    with _reference_pass(outermost, own, lambda nothing: below) as nothing:
        yield nothing


# -- what passes of one model share ----------------------------------------------------------------------------------


@contextmanager
def _reference_pass(models: list[Module], own: Any, in_eval_mode: Callable[[Any], Iterable[Module]]) -> Iterator[Any]:
    """The release's context inside ours.

    Args:
        models: the models whose adapters are switched; they identify passes that overlap.
        own: the release's context manager.
        in_eval_mode: the models that must be in eval mode, given what the release's context yields.
    """
    with _turn():
        shared = _open.setdefault(tuple(map(id, models)), _Shared(models))
    this = object()
    try:
        with _turn():
            yielded = shared.enter(this, own, in_eval_mode)
        yield yielded
    finally:
        with _turn():
            shared.leave(this)


class _Shared:
    """The shared state of the passes that are open on the same models. Use it only with the lock held."""

    def __init__(self, models: list[Module]) -> None:
        self.models = models  # referenced, so that their ids stay valid
        self.wanted: dict[object, _State] = {}  # by open pass, in the order of entry

    def enter(self, this: object, own: Any, in_eval_mode: Callable[[Any], Iterable[Module]]) -> Any:
        if not self.wanted:
            self.contexts = ExitStack()
            self.training: dict[Module, bool] = {}
            self.adapters = _Adapters(self.models)
        before = self.wanted[this] = self.adapters.state()
        yielded = self.contexts.enter_context(own)
        self.wanted[this] = self.adapters.entered(before)
        for module in _modules(in_eval_mode(yielded)):
            # Flag by flag, not by `eval()` and `train()`: these would put modules into training mode that were not (a
            # frozen vision tower), and run a model's own code in `train` (transformers exchanges kernels).
            self.training.setdefault(module, module.training)
            if module.training:
                _set_training(module, False)
        return yielded

    def leave(self, this: object) -> None:
        if self.wanted.pop(this, None) is None:
            return
        if self.wanted:
            self.adapters.set_state(next(reversed(self.wanted.values())))
            return
        with ExitStack() as whatever_fails:
            whatever_fails.callback(self.adapters.restore)
            whatever_fails.callback(self.contexts.close)
            for module, training in self.training.items():
                if module.training != training:
                    _set_training(module, training)


TIMEOUT = 60.0
"""Timeout in seconds. A thread that holds the lock longer hangs in a release's own context; other ranks wait for it."""

_lock = threading.RLock()  # reentrant: the garbage collector may close an abandoned context anywhere
# Weak: the open passes hold the references.
_open: weakref.WeakValueDictionary[tuple[int, ...], _Shared] = weakref.WeakValueDictionary()


@contextmanager
def _turn() -> Iterator[None]:
    lock = _lock
    held = lock.acquire(timeout=TIMEOUT)
    try:
        yield
    finally:
        if held:
            lock.release()


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


# A child must not inherit a lock that another thread of the parent held while it forked.
os.register_at_fork(after_in_child=_renew_lock)


def _modules(models: Iterable[Module]) -> list[Module]:
    """Every module of these models, once."""
    # Module.modules() passes each module up through one generator per level, which is several times slower.
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
        # torch's searches parameters, buffers and modules first, which is ten times slower.
        object.__setattr__(module, "training", training)
    else:
        module.training = training


@functools.cache
def _has_adapters(kind: type) -> bool:
    """`issubclass`, cached because it is slow with abstract classes such as PEFT's."""
    return issubclass(kind, (*_TUNERS, *_ADAPTER_LAYERS))


class _State(NamedTuple):
    """The active and the disabled adapters of every tuner and of every layer."""

    of_tuners: list[Any]
    of_layers: list[Any]
    disabled: list[bool]


class _Adapters:
    """The adapters of some models, as they are when this object is created."""

    def __init__(self, models: Iterable[Module]) -> None:
        # mypy reports that classes cannot be hashed.
        modules = [module for module in _modules(models) if _has_adapters(type(module))]  # type: ignore[arg-type]
        self.tuners: list[Any] = [module for module in modules if isinstance(module, _TUNERS)]
        self.layers: list[Any] = [module for module in modules if isinstance(module, _ADAPTER_LAYERS)]
        self.first = self.state()
        self.trainable = [
            (parameter, parameter.requires_grad)
            for module in _modules(self.layers)
            for parameter in module._parameters.values()
            if parameter is not None
        ]

    def state(self) -> _State:
        return _State(
            [tuner.active_adapter for tuner in self.tuners],
            [layer.active_adapter for layer in self.layers],
            [layer.disable_adapters for layer in self.layers],
        )

    def entered(self, before: _State) -> _State:
        """The state that the release's context should have set: it does not know that another is open.

        Switching to the reference adapter has no effect if another pass has disabled all adapters.
        """
        state = self.state()
        if state.of_layers != before.of_layers:
            state = state._replace(disabled=self.first.disabled)
            self.set_state(state)
        return state

    def set_state(self, state: _State) -> None:
        for layer, active, disabled in zip(self.layers, state.of_layers, state.disabled, strict=True):
            if (layer.active_adapter, layer.disable_adapters) != (active, disabled):
                layer.set_adapter(active)  # writes: this is the repair
                layer.enable_adapters(not disabled)  # writes: this is the repair
        for tuner, active in zip(self.tuners, state.of_tuners, strict=True):
            if tuner.active_adapter != active:
                tuner.active_adapter = active

    def restore(self) -> None:
        """Restore all flags, including trainability: PEFT makes every parameter of an active adapter trainable."""
        self.set_state(self.first)
        for parameter, flag in self.trainable:
            if parameter.requires_grad != flag:
                # writes: this is the repair
                parameter.requires_grad_(flag)
