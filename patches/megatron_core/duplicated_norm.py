"""A weight that is replicated on each tensor-parallel rank counts once in the gradient norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhf_patches import CoInstalled, Condition, Guard, Patch, Variant, Wrap

from ._conditions import is_whole


def around_init(wrapped: Callable[..., None], layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Wrap `TELinear.__init__`; parameters of a layer that is not divided are marked as such."""
    wrapped(*args, **kwargs)
    if is_whole(layer, kwargs["parallel_mode"], kwargs.get("is_expert", False)):
        for parameter in layer.parameters():
            if getattr(parameter, "tensor_model_parallel", False):
                # Not `False`: mcore-bridge 1.6.5 compares with `is False`, its adapters would have other shapes, and
                # saved adapters would not load.
                parameter.tensor_model_parallel = 0  # writes: while the layer is built


PATCH = Patch(
    name="megatron-core-duplicated-norm",
    summary="a weight that is replicated on each tensor-parallel rank counts once in the gradient norm",
    harm="wrong gradient",
    bug="a weight that is replicated on each tensor-parallel rank counts TP times in the gradient norm",
    when="TransformerEngine, tensor_model_parallel_size above 1, and layers that it does not divide: multi-latent "
    "attention's down-projections (DeepSeek, Kimi)",
    excluded_by=("tensor_model_parallel_size=1",),
    symptom="""\
With `tensor_model_parallel_size` above 1 and multi-latent attention, the gradient norm that is logged and used for
clipping is larger than that of the same model on one rank. `--clip-grad` clips steps that it should not. No error is
raised.""",
    cause="""\
`TELinear` with `parallel_mode="duplicated"` is TransformerEngine's `Linear` without tensor parallelism. This class
always marks its weight `tensor_model_parallel`. Megatron takes a marked parameter for a part that no other rank has,
and sums the squares over all ranks, which are TP copies of the same values.""",
    repair="""\
The patch marks the parameters of such a layer as not divided, like those of a layer norm: rank 0 counts them for all
ranks. It does not change a layer that is divided, a layer of experts, or a subclass of `TELinear` that is defined
elsewhere, except mcore-bridge's `OutputLayerLinear`.

mcore-bridge 1.6.5 uses the same mark to decide whether a LoRA adapter of such a layer is divided. It does not check for
the value that the patch sets, so adapters keep their shapes, and checkpoints of adapters load. Megatron-FSDP of
megatron-core 0.15 and older takes the mark for a division, and its checkpoints contain the layer TP times. With the
patch, they contain it once. A checkpoint that was saved without the patch does not load with it (`Size mismatch between
saved ... and current`), nor the reverse: finish such a run with
`RLHF_PATCHES_DISABLE=megatron-core-duplicated-norm`.""",
    changes_numbers="""\
Since 0.11.0, `grad_norm` was too large. A weight with a share s of the squared norm increased it by the root of 1 + (TP
- 1) s; factors of 1.36 to 1.52 at TP 8 were reported for DeepSeek-V3's shape. A run whose norms were mostly above
`clip_grad` took steps that were too small by that factor, and takes larger ones with the patch. To keep the step size,
divide its `clip_grad` by that factor. If the norm was below `clip_grad`, only the logged value changes.""",
    references=("https://github.com/NVIDIA/Megatron-LM/pull/3213",),
    variants=(
        Variant(
            Guard("megatron-core", ">=0.11.0rc0,<0.17.0", co_installed=CoInstalled("transformer-engine", ">=1.0")),
            (
                Wrap(
                    target="megatron.core.extensions.transformer_engine:TELinear.__init__",
                    implementation=f"{__name__}:{around_init.__name__}",
                    fingerprints={
                        "5b262e17a374590d": "0.11.0rc0 to 0.12.3",
                        "b8f44d7c2fb3f8e2": "0.13.0rc0 to 0.13.0rc2",
                        "0f56935285206f6b": "0.13.0rc3 to 0.13.1, 0.14.0rc1 to 0.16.0rc0.dev132713",
                        "fd7fdb9d2d3af745": "0.14.0rc0",
                        "12b4795dbc46ae54": "0.16.0, 0.16.1",
                    },
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest megatron-core in use is 0.17.0",
    conditions=(
        Condition(
            "megatron.core.extensions.transformer_engine:TELinear.__init__",
            f"{__package__}._conditions:whole_on_each_rank",
        ),
    ),
)
