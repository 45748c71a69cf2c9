"""ms-swift's linear attention (Qwen3-Next, Qwen3.5), of which every tensor-parallel rank computes the whole."""

from __future__ import annotations

from typing import Any

from rlhf_patches import Guard, Patch, Rewrite, Variant

from .. import _released

_NAME = "swift-linear-attention-gradient"


def gathered(layer: Any, gather: Any, states: Any) -> Any:
    """The whole sequence; what goes back is this rank's piece, unless a user's code may see to it."""
    if _stays(layer, gather):
        return gather(states)
    return gather(states, tensor_parallel_output_grad=False)


def scaled_back(layer: Any, tensor: Any, factor: float, *mappings: Any) -> Any:
    """The tensor itself; what goes back through it is multiplied by a factor, unless a user's code may see to it."""
    if tensor.requires_grad and not _stays(layer, *mappings) and not _added_up(layer):
        tensor.register_hook(lambda gradient: gradient * factor)  # writes: a tensor that the layer has just made
    return tensor


def _stays(layer: Any, *mappings: Any) -> str:
    """What of the layer's forward and of Megatron's functions between the ranks is a user's, who may have met the bug.

    Args:
        layer: of linear attention.
        mappings: what gathers a sequence, and what scatters it.
    """
    # known: ms-swift's and Megatron's own, by what no decorator copies
    other = _released.others(layer, "forward", packages=("swift",))
    if not all(_released.is_released(mapping, ("megatron",)) for mapping in mappings):
        other = other or "what gathers or scatters"
    if other:
        _released.stays(_NAME, f"{other} is not the release's own", "linear attention")
    return other


def _added_up(layer: Any) -> bool:
    """Whether Megatron adds up gradients of this layer over the tensor-parallel ranks: ms-swift does not ask for it."""
    # known: by this attribute, which is what a user who has met the bug sets
    found = any(getattr(one, "sequence_parallel", False) is True for one in layer.parameters())
    if found:
        _released.stays(_NAME, "parameters are marked sequence_parallel", "linear attention")
    return found


_V3 = "swift.megatron.model.gpt.qwen3_next:Qwen3NextGatedDeltaNet.forward"
_V4 = (
    "swift.megatron.model.gpts.qwen3_next:Qwen3NextGatedDeltaNet.forward",
    "swift.megatron.model.mm_gpts.qwen3_5:Qwen3_5MoeGatedDeltaNet.forward",
)


def _gathered(target: str) -> Rewrite:
    """What is gathered is computed by every rank alike: each has the whole gradient, and takes its piece."""
    return Rewrite(
        target=target,
        pattern="gather_from_sequence_parallel_region(hidden_states)",
        replacement="$GATHERED(self, gather_from_sequence_parallel_region, hidden_states)",
        uses={"GATHERED": f"{__name__}:{gathered.__name__}"},
        unless=("reduce_scatter_to_sequence_parallel_region($$$ARGUMENTS)",),  # as 3.12.4 does
    )


# Where the output is the mean of the ranks', whose dropouts may differ, so is what goes back: LoRA's in a mixture's
# experts draw as many numbers as a rank has tokens there, and ranks go on with other ones.
_SIZE = "args.tensor_model_parallel_size"


def _scaled(target: str, pattern: str, replacement: str) -> Rewrite:
    return Rewrite(
        target=target,
        pattern=pattern,
        replacement=replacement,
        uses={"SCALED_BACK": f"{__name__}:{scaled_back.__name__}"},
    )


def _averaged(target: str) -> tuple[Rewrite, ...]:
    """The layer has the whole gradient of its output, and the ranks' mean goes back."""
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
    summary="under sequence parallelism linear attention has the gradients of one rank",
    harm="wrong gradient",
    bug="what goes back through linear attention is multiplied by TP, or the layer's own gradient is divided by it",
    when="Megatron, Qwen3-Next or Qwen3.5 by transformers' layers, tensor and sequence parallelism",
    excluded_by=("tensor_model_parallel_size=1", "sequence_parallel=false"),
    symptom="""\
Qwen3-Next on Megatron with `--tensor_model_parallel_size` above 1 and `--sequence_parallel true`. To 3.12.3 the
gradient norm is very high, and the higher the more layers and ranks there are; the loss hardly falls. From 3.12.4 to
4.0.4, Qwen3.5 too, the norm looks right, and linear attention learns too slowly beside the rest. No error.""",
    cause="""\
Each tensor-parallel rank gathers the sequence, computes the layer on all of it, and keeps its part of the output.
Backward of the gathering adds up what the ranks have, which is the same on each: TP times the gradient goes back to all
layers before. 3.12.4 divides the output's gradient by TP to make up for it. Then what goes back is right, but the
layer's own weights have 1 / TP of their gradient on each rank, and nothing adds those up.""",
    repair="""\
To 3.12.3 backward of the gathering takes this rank's piece. From 3.12.4 on the layer has the whole gradient of its
output, and what goes back is the mean of what the ranks have, as the output is. All gradients are then those of one
rank. The output is bit for bit what it was; from 3.12.4 on so is what goes back, where TP is a power of two, also with
dropouts that differ between the ranks (LoRA's, behind a mixture).
Without sequence parallelism, and with TP of 1, nothing changes.

Left alone, with one line: from 3.12.4 on a layer with a parameter that you have marked `sequence_parallel`, of whose
gradients Megatron adds up the ranks' parts; and a layer with a `forward` of your own, or between whose ranks functions
of your own gather or scatter. Left alone as well: `SWIFT_USE_MCORE_GDN=1`, megatron-core's own layer
(`megatron-core-gdn-norm-gradient`), and ms-swift 4.1 and later, whose models are in mcore-bridge.""",
    changes_numbers="""\
From 3.9.0 to 3.12.3 everything before a layer of linear attention had a part of its gradient multiplied by TP, which
adds up over the layers; from 3.12.4 to 4.0.4 these layers' own weights had 1 / TP of theirs. With the patch all is as
with TP of 1. A learning rate, or a clipping, that was tuned with it should be looked at again. Who multiplies these
layers' gradients by TP, or adds them up over the ranks after backward, has to take that out.""",
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
)
