"""Marks the weight of a Gated DeltaNet's norm if each rank has some of its heads."""

from __future__ import annotations

from typing import Any

from ._conditions import is_known_delta_net

_MARK = "summed_over_divided_heads"
_NORMS = ("megatron.core.", "transformer_engine.", "torch.nn.", "mcore_bridge.")


def mark(layer: Any, norm: Any, ranks: int) -> None:
    """Mark the weight of a layer's norm if the layer's heads are divided over ranks.

    Megatron marks parameters the same way, with ``sequence_parallel``: code that preserves one mark preserves the
    other.
    """
    # known: a user's layer, or norm, may add up the gradient itself
    if ranks > 1 and is_known_delta_net(layer) and type(norm).__module__.startswith(_NORMS):
        for parameter in norm.parameters():
            setattr(parameter, _MARK, True)  # writes: the mark that makes the sum include its gradient


def is_marked(parameter: Any) -> bool:
    """Whether a rank's gradient of this parameter is a part of a sum over the ranks that share a layer.

    False if the parameter has a hook, which Megatron never registers: a user's hook may have changed the gradient.
    """
    return getattr(parameter, _MARK, False) and not parameter._backward_hooks
