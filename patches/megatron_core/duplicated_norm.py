"""A weight that each tensor-parallel rank has whole counts once in the norm of the gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhf_patches import CoInstalled, Condition, Guard, Patch, Variant, Wrap

from ._conditions import is_whole


def around_init(wrapped: Callable[..., None], layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`TELinear.__init__`; parameters of a layer that is not divided are marked as such."""
    wrapped(*args, **kwargs)
    if is_whole(layer, kwargs["parallel_mode"], kwargs.get("is_expert", False)):
        for parameter in layer.parameters():
            if getattr(parameter, "tensor_model_parallel", False):
                # Not `False`, for which mcore-bridge 1.6.5 asks with `is`: its adapters would have other shapes, and
                # those that were saved would not load.
                parameter.tensor_model_parallel = 0  # writes: while the layer is made


PATCH = Patch(
    name="megatron-core-duplicated-norm",
    summary="a weight that each tensor-parallel rank has whole counts once in the norm of the gradient",
    harm="wrong gradient",
    bug="a weight that each tensor-parallel rank has whole counts TP times in the norm of the gradient",
    when="TransformerEngine, tensor_model_parallel_size above 1, and layers that it does not divide: multi-latent "
    "attention's down-projections (DeepSeek, Kimi)",
    excluded_by=("tensor_model_parallel_size=1",),
    symptom="""\
With `tensor_model_parallel_size` above 1 and multi-latent attention, the norm that is logged and clipped by is larger
than that of the same model on one rank: `--clip-grad` shrinks steps that it should leave alone. Nothing fails.""",
    cause="""\
`TELinear` with `parallel_mode="duplicated"` is TransformerEngine's `Linear` without tensor parallelism, which marks its
weight `tensor_model_parallel` whatever it is asked for. Megatron takes a marked parameter for a part that no other rank
has, and adds the squares of each rank's: TP times the same ones.""",
    repair="""\
The parameters of such a layer are marked as not divided, as those of a layer norm are: rank 0 counts them for all. A
layer that is divided, and a layer of experts, stay as they are. So does a class that derives from `TELinear` elsewhere,
but for mcore-bridge's `OutputLayerLinear`.

mcore-bridge 1.6.5 tells by the same mark whether a LoRA adapter of such a layer is divided. What the patch sets is not
the one that it asks for, and adapters have the shapes that they had: checkpoints of adapters load. Megatron-FSDP of
megatron-core 0.15 and older takes the mark for a division in its checkpoints, which have the layer TP times. With the
patch they have it once, and one that was saved without it does not load (`Size mismatch between saved ... and
current`), nor the reverse: finish such a run with `RLHF_PATCHES_DISABLE=megatron-core-duplicated-norm`.""",
    changes_numbers="""\
Since 0.11.0 `grad_norm` was too large: with a weight that has a share s of the squared norm, by the root of
1 + (TP - 1) s; 1.36 to 1.52 times at TP 8 were reported for DeepSeek-V3's shape. A run whose norms were mostly above
`clip_grad` has taken steps that much smaller than meant, and takes larger ones now: divide its `clip_grad` by that
factor to go on as before. Where the norm was below, nothing changes but what is logged.""",
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
