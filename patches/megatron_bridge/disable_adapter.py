"""Megatron-Bridge: leaving ``disable_adapter`` enables every adapter, including those that were off."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import rlhf_patches
from rlhf_patches import Condition, Guard, Patch, Variant, Wrap

_NAME = "megatron-bridge-disable-adapter"
_CONTEXT = "megatron.bridge.peft.base:PEFT.disable_adapter"


# writes: switches off what the context has switched on, which is the repair
def leaving_them_off(wrapped: Callable[..., Any], peft: Any, args: Any, kwargs: Any) -> Generator[Any, None, None]:
    """Wrap ``PEFT.disable_adapter``: layers whose adapter was off before are off afterwards."""
    (model,) = args
    off = [
        layer.disable_adapter_layers
        for layer in _layers(model)
        if getattr(layer, "_adapter_enabled", None) is False
        and callable(getattr(layer, "disable_adapter_layers", None))
    ]
    try:
        with contextmanager(wrapped)(*args, **kwargs) as nothing:
            yield nothing
    finally:
        for switch_off in off:
            switch_off()
        rlhf_patches.decided(_NAME, bool(off))


def _layers(model: Any) -> Iterator[Any]:
    """Every module of a model, or of several models in lists or dictionaries, which the release also accepts."""
    if hasattr(model, "modules"):
        yield from model.modules()
    elif isinstance(model, Iterable):
        for each in model.values() if isinstance(model, Mapping) else model:
            yield from _layers(each)


PATCH = Patch(
    name=_NAME,
    summary="adapters that were off before disable_adapter() are off after it",
    harm="wrong gradient",
    bug="disable_adapter() enables adapters that were off before it, so the reference model has them",
    when="a second disable_adapter() within the first, or while adapters are off",
    symptom="""\
The model without its adapter is the reference model: `with peft.disable_adapter(model):`. A second context inside the
first (a helper that opens its own), or one that is opened while adapters are off already, leaves all adapters on.
Everything after it in the outer context, such as the reference log-probabilities or an evaluation of the base model,
uses the adapter. No error is raised.""",
    cause="Leaving the context calls `enable_adapter_layers`, whatever the state before it was.",
    repair="""\
When the context is left, normally or by an exception, the layers whose adapters were off when it was entered are off
again. All other layers are on, as released. Contexts have to be left in the reverse order, as `with` does.""",
    references=("https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5945",),
    variants=(
        Variant(
            Guard("megatron-bridge", ">=0.3.0,<=0.6.2"),
            (
                Wrap(
                    target=_CONTEXT,
                    implementation=f"{__name__}:leaving_them_off",
                    fingerprints={"2ee7ee9deef7f7c4": "0.3.0 to 0.6.2"},
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest Megatron-Bridge in use restores the previous state; none released so far does",
    conditions=(Condition(_CONTEXT),),
    changes_numbers="""\
Since 0.3.0, a computation in a context of `disable_adapter` used the adapter after an inner context was left. If a
run's reference pass did that, the policy was compared with itself instead of the reference model: its KL divergence was
too small.""",
)
