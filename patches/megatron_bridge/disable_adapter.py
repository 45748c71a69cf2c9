"""Megatron-Bridge: leaving ``disable_adapter`` enables every adapter, also those that were off."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rlhf_patches import Guard, Patch, Variant, Wrap


# writes: what the context has switched on is off again, which is the repair
def leaving_them_off(wrapped: Callable[..., Any], peft: Any, args: Any, kwargs: Any) -> Generator[Any, None, None]:
    """Around ``PEFT.disable_adapter``: layers whose adapter was off before are off afterwards."""
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


def _layers(model: Any) -> Iterator[Any]:
    """Every module of a model; or of several, in lists or dictionaries, which the release walks through too."""
    if hasattr(model, "modules"):
        yield from model.modules()
    elif isinstance(model, Iterable):
        for each in model.values() if isinstance(model, Mapping) else model:
            yield from _layers(each)


PATCH = Patch(
    name="megatron-bridge-disable-adapter",
    summary="adapters that were off before disable_adapter() are off after it",
    harm="wrong gradient",
    bug="disable_adapter() switches adapters on that were off before it, so the reference has them",
    when="a second disable_adapter() within the first, or while adapters are off",
    symptom="""\
The model without its adapter is the reference: `with peft.disable_adapter(model):`. A second context within the first
(a helper that opens its own), or one that is opened while adapters are off already, leaves all of them on: what follows
in the outer context, the reference's log-probabilities or an evaluation of the base model, has the adapter in it. No
error is shown.""",
    cause="Leaving the context calls `enable_adapter_layers`, whatever was before.",
    repair="""\
When the context is left, normally or by an exception, the layers whose adapters were off when it was entered are off
again; the others are on, as released. Contexts have to be left in the reverse order, as `with` does.""",
    references=("https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5945",),
    variants=(
        Variant(
            Guard("megatron-bridge", ">=0.3.0,<=0.6.2"),
            (
                Wrap(
                    target="megatron.bridge.peft.base:PEFT.disable_adapter",
                    implementation=f"{__name__}:leaving_them_off",
                    fingerprints={"2ee7ee9deef7f7c4": "0.3.0 to 0.6.2"},
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest Megatron-Bridge in use restores what was; none released so far does",
    changes_numbers="""\
Since 0.3.0 what was computed in a context of `disable_adapter` after an inner one was left had the adapter in it. A run
whose reference pass did that was held to itself in place of its reference: its KL divergence was too small.""",
)
