"""Which parameters are trainable, remembered and put back: around functions of PEFT that switch it on the way."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any


class Remembered:
    """``requires_grad`` of parameters, as it is when this is made."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        self._before = [(parameter, parameter.requires_grad) for parameter in parameters]

    def restore(self) -> None:
        """Of those that can be switched: FSDP shows views in place of parameters at times, which cannot."""
        for parameter, before in self._before:
            if parameter.requires_grad != before and parameter.is_leaf:
                parameter.requires_grad_(before)


def of_the_others(wrapped: Callable[..., Any], tuner: Any, args: Any, kwargs: Any) -> Any:
    """Around ``BaseTuner.inject_adapter``: what was there before stays as trainable as it was."""
    model, adapter = args[:2]
    if adapter in tuner.active_adapters:
        # The first adapter, which freezes the base model; or the only one of a tuner of its own, which replaces the
        # active ones (`inject_adapter_in_model`).
        return wrapped(*args, **kwargs)
    before = Remembered(
        parameter
        for name, parameter in model.named_parameters()
        # Some tuners have made the new adapter's parameters by now.
        if f".{adapter}." not in name and not name.endswith(f".{adapter}")
    )
    try:
        return wrapped(*args, **kwargs)
    finally:
        before.restore()


def after_disabling(wrapped: Callable[..., Any], model: Any, args: Any, kwargs: Any) -> Generator[Any, None, None]:
    """Around ``PeftModel.disable_adapter``: what was trainable before is afterwards, and nothing else.

    Of layers that were disabled already nothing is remembered: their flags are those of whoever disabled them.
    """
    kinds = _adapter_layers()
    before = [
        (layer, _active(layer), Remembered(layer.parameters()))
        for layer in model.modules()
        if isinstance(layer, kinds) and not layer.disable_adapters
    ]
    try:
        with contextmanager(wrapped)(*args, **kwargs) as nothing:
            yield nothing
    finally:
        for layer, active, flags in before:
            if _active(layer) == active:  # else it has been switched within, which makes others trainable
                flags.restore()


def _active(layer: Any) -> list[str]:
    """Which adapters are active; of several, or of none, it is a list."""
    return [layer.active_adapter] if isinstance(layer.active_adapter, str) else list(layer.active_adapter)


@functools.cache
def _adapter_layers() -> Any:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import other

    # PEFT before 0.16 has only the one that newer ones derive from the other.
    return BaseTunerLayer, getattr(other, "AuxiliaryTrainingWrapper", other.ModulesToSaveWrapper)
