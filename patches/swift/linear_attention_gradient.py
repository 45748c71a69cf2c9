"""ms-swift's linear attention (Qwen3-Next, Qwen3.5), which every tensor-parallel rank computes whole."""

from __future__ import annotations

import sys
from typing import Any

import rlhf_patches
from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

from .. import _hooks, _released

_NAME = "swift-linear-attention-gradient"
_FORWARDS = ("swift", "transformers", "megatron", "torch")


def gathered(layer: Any, gather: Any, states: Any) -> Any:
    """The whole sequence; backward takes this rank's piece of the gradient, unless a user's code may do so."""
    # known: the release's own forward uses its module's function.
    module = sys.modules.get(_released.written_in(getattr(type(layer), "forward", None)))
    if _stays(layer, gather, getattr(module, "scatter_to_sequence_parallel_region", gather)):
        return gather(states)
    rlhf_patches.decided(_NAME, True)
    return gather(states, tensor_parallel_output_grad=False)


def scaled_back(layer: Any, tensor: Any, factor: float, *mappings: Any) -> Any:
    """The tensor itself; backward multiplies its gradient by a factor, unless a user's code may do so."""
    if tensor.requires_grad and not _stays(layer, *mappings) and not _added_up(layer):
        tensor.register_hook(lambda gradient: gradient * factor)  # writes: a tensor that the layer has just created
        if factor > 1:  # the output; the hidden states may need no gradient
            rlhf_patches.decided(_NAME, True)
    return tensor


def _stays(layer: Any, *mappings: Any) -> str:
    """The first of the layer's forwards and hooks, and of Megatron's functions between ranks, that is a user's.

    It may have the repair.

    Args:
        layer: of linear attention.
        mappings: the functions that gather and scatter a sequence.
    """
    # known: ms-swift's and Megatron's own, from attributes that no decorator copies
    other = _released.others(layer, "forward", packages=("swift",))
    if not all(_released.is_released(mapping, ("megatron",)) for mapping in mappings):
        other = other or "the function that gathers or scatters"
    for kind in type(layer).__mro__:  # its own forward calls the next one
        if not other and "forward" in vars(kind) and not _released.is_released(vars(kind)["forward"], _FORWARDS):
            other = f"{kind.__name__}.forward"
    other = other or _hooks.others(layer)
    if other:
        _released.stays(_NAME, f"{other} is not the release's own", "linear attention")
    return other


def _added_up(layer: Any) -> bool:
    """Whether Megatron sums gradients of this layer over the tensor-parallel ranks; ms-swift does not request it."""
    # known: by this attribute, which a user's repair sets
    found = any(bool(getattr(one, "sequence_parallel", False)) for one in layer.parameters())
    hook = _hooks.others(*layer.parameters())
    if found or hook:
        why = "parameters are marked sequence_parallel" if found else f"{hook} is not the release's own"
        _released.stays(_NAME, why, "linear attention")
    return found or bool(hook)


_V3 = "swift.megatron.model.gpt.qwen3_next:Qwen3NextGatedDeltaNet.forward"
_V4 = (
    "swift.megatron.model.gpts.qwen3_next:Qwen3NextGatedDeltaNet.forward",
    "swift.megatron.model.mm_gpts.qwen3_5:Qwen3_5MoeGatedDeltaNet.forward",
)


def _gathered(target: str) -> Rewrite:
    """Every rank computes the same from the gathered sequence: each has the whole gradient, and takes its piece."""
    return Rewrite(
        target=target,
        pattern="gather_from_sequence_parallel_region(hidden_states)",
        replacement="$GATHERED(self, gather_from_sequence_parallel_region, hidden_states)",
        uses={"GATHERED": f"{__name__}:{gathered.__name__}"},
        unless=("reduce_scatter_to_sequence_parallel_region($$$ARGUMENTS)",),  # as 3.12.4 does
    )


# The output is the mean over ranks, whose dropouts may differ, so the gradient is the mean too: LoRA's dropouts in a
# mixture's experts draw one number per token of the rank there, after which the ranks' generators differ.
_SIZE = "args.tensor_model_parallel_size"


def _scaled(target: str, pattern: str, replacement: str) -> Rewrite:
    return Rewrite(
        target=target,
        pattern=pattern,
        replacement=replacement,
        uses={"SCALED_BACK": f"{__name__}:{scaled_back.__name__}"},
    )


def _averaged(target: str) -> tuple[Rewrite, ...]:
    """The layer gets the whole gradient of its output, and backward returns the ranks' mean."""
    gather, scatter = "gather_from_sequence_parallel_region", "reduce_scatter_to_sequence_parallel_region"
    both = f"{gather}, {scatter}"
    return (
        _scaled(
            target, f"{gather}(hidden_states)", f"$SCALED_BACK(self, {gather}(hidden_states), 1 / {_SIZE}, {both})"
        ),
        _scaled(target, f"{scatter}(res) / {_SIZE}", f"{scatter}($SCALED_BACK(self, res, {_SIZE}, {both})) / {_SIZE}"),
    )


PATCH = Patch(
    name=_NAME,
    summary="under sequence parallelism, linear attention has the gradients of one rank",
    harm="wrong gradient",
    bug="the gradient through linear attention is multiplied by TP, or the layer's own gradient is divided by it",
    when="Megatron, Qwen3-Next or Qwen3.5 with transformers' layers, tensor and sequence parallelism",
    excluded_by=("tensor_model_parallel_size=1", "sequence_parallel=false"),
    symptom="""\
The bug affects Qwen3-Next on Megatron with `--tensor_model_parallel_size` above 1 and `--sequence_parallel true`. Up to
3.12.3, the gradient norm is very high and grows with the number of layers and ranks, and the loss hardly falls. From
3.12.4 to 4.0.4, which includes Qwen3.5, the norm looks right, and linear attention learns too slowly compared with the
other layers. No error is raised.""",
    cause="""\
Each tensor-parallel rank gathers the sequence, computes the layer on all of it, and keeps its part of the output. The
backward of the gathering sums the ranks' gradients, which are the same on each rank: all earlier layers get TP times
the gradient. 3.12.4 divides the output's gradient by TP to compensate. The gradient for earlier layers is then right,
but the layer's own weights have 1 / TP of their gradient on each rank, and nothing sums those.""",
    repair="""\
Up to 3.12.3, the backward of the gathering takes this rank's piece. Since 3.12.4, the layer gets the whole gradient of
its output, and backward returns the mean over the ranks, because the output is the mean of the ranks' outputs. All
gradients then equal those of one rank. The output is bitwise identical. Since 3.12.4, the gradient for earlier layers
is also bitwise identical if TP is a power of two, also with dropouts that differ between the ranks. Without sequence
parallelism, and with TP of 1, nothing changes.

The patch does not change these, and rank 0 logs one warning, if it has such a layer:

- since 3.12.4, a layer with a parameter that you have marked `sequence_parallel`, because Megatron sums the ranks'
  parts of its gradients, or with a hook of yours on a parameter;
- a layer with your own `forward` (also one that you assigned to transformers' class), with your own hook, or whose
  functions that gather or scatter you have replaced.

The patch does not repair `SWIFT_USE_MCORE_GDN=1`, which is megatron-core's own layer
(`megatron-core-gdn-norm-gradient`), or ms-swift 4.1 and later, whose models are in mcore-bridge.""",
    changes_numbers="""\
From 3.9.0 to 3.12.3, everything before a layer of linear attention had a part of its gradient multiplied by TP, which
accumulates over the layers. From 3.12.4 to 4.0.4, these layers' own weights had 1 / TP of their gradient. With the
patch, all gradients are as with TP of 1. If you tuned a learning rate or a clipping threshold without the patch, check
it again. If your code multiplies these layers' gradients by TP, or sums them over the ranks after backward, remove that
code.""",
    references=(
        "https://github.com/modelscope/ms-swift/issues/6836",
        "https://github.com/modelscope/ms-swift/pull/7941",
    ),
    variants=(
        Variant(Guard("ms-swift", ">=3.9.0,<3.12.4"), (_gathered(_V3),)),
        Variant(Guard("ms-swift", ">=3.12.4,<4.0.0"), _averaged(_V3)),
        Variant(
            Guard("ms-swift", ">=4.0.0,<4.1.0"),
            tuple(rewrite for target in _V4 for rewrite in _averaged(target)),
            independent=True,
        ),
    ),
    obsolete_when="when the oldest ms-swift in use is 4.1",
    conditions=tuple(
        Condition(target, f"{__package__}._conditions:computes_whole_sequences") for target in (_V3, *_V4)
    ),
)
