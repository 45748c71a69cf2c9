"""Dropout that is active where a trainer computes log-probabilities; an engine has no dropout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rlhf_patches.watching import Known


def active(*models: Any) -> Known | None:
    """The note on dropout in these models, if a module in training mode has any.

    LoRA's dropout applies to the adapters' output, which is 0 when training begins. The model's own dropout increases
    the difference from the first batch on.
    """
    found = {name: value for model in models for name, value in _of(model.named_modules())}
    if not found:
        return None
    own = [value for name, value in found.items() if ".lora_dropout." not in f".{name}."]
    where = "the model" if own else "LoRA"
    return Known(
        f"Dropout of {where} is active (p {max(own or found.values()):g}) where the trainer computes them, which makes "
        "them differ without an error; disable it for a more precise figure.",
        usual=bool(own),
    )


def _of(modules: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, float]]:
    from torch import nn

    layers = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    for name, module in modules:
        if module.training:
            for attribute, value in vars(module).items():
                if isinstance(value, float) and value > 0 and ("drop" in attribute or isinstance(module, layers)):
                    yield f"{name}.{attribute}", value
