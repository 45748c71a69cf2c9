"""Attention sinks of all tensor-parallel ranks count in the gradient norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhf_patches import CoInstalled, Condition, Guard, Patch, Rewrite, Variant

from ._conditions import is_own


def mark(attention: Any) -> None:
    """Mark an attention's learnable sinks as divided over tensor-parallel ranks, if they are."""
    if not is_own(attention):  # it may mark them itself, which requires that they are unmarked
        return
    sinks: Any = dict(attention.named_parameters(recurse=False)).get("softmax_offset")
    divided = sinks is not None and sinks.numel() < attention.config.num_attention_heads
    if divided and not hasattr(sinks, "tensor_model_parallel"):
        sinks.tensor_model_parallel = True  # writes: while the layer is built
        # Read wherever a parameter has this mark.
        sinks.partition_dim = 0  # writes: as above
        sinks.partition_stride = 1  # writes: as above


def marking(attention: Any, init: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``__init__`` of TransformerEngine's attention, which creates the sinks; mark them after it."""

    def made(*args: Any, **kwargs: Any) -> None:
        init(*args, **kwargs)
        mark(attention)

    return made


#: The marking of PR #7530, which requires that the sinks are unmarked.
_MARKED = ("tensor_parallel.set_tensor_model_parallel_attributes($$$)", "set_tensor_model_parallel_attributes($$$)")

PATCH = Patch(
    name="megatron-core-attention-sink-norm",
    summary="attention sinks of all tensor-parallel ranks count in the gradient norm",
    harm="wrong gradient",
    bug="the gradient norm omits the attention sinks of all tensor-parallel ranks but the first",
    when='softmax_type="learnable" (gpt-oss) and tensor_model_parallel_size above 1',
    excluded_by=("tensor_model_parallel_size=1",),
    symptom="""\
A model with learnable attention sinks (gpt-oss, `softmax_type="learnable"`) and `tensor_model_parallel_size` above 1
logs a gradient norm that is smaller than that of the same model on one rank. `--clip-grad` does not clip steps that are
too large. No error is raised.""",
    cause="""\
`DotProductAttention` and `TEDotProductAttention` create `softmax_offset` with one number for each head of the rank. A
tensor-parallel rank other than the first counts only parameters that are marked `tensor_model_parallel` in the norm.
Neither class marks `softmax_offset`, so Megatron takes it for a copy of the first rank's.""",
    repair="""\
Both classes mark the sinks of a divided layer while it is built, with the dimension in which they are divided, as
Megatron's linear layers mark their weights. The patch does not change a layer whose heads are all on one rank, or a
layer with another `softmax_type`. It does not change a subclass that is defined outside Megatron: the subclass may mark
the sinks itself, and Megatron raises for a parameter that is already marked. Code that marks the sinks while a layer is
built, with `set_tensor_model_parallel_attributes`, raises this AssertionError with the patch: remove that code.

The norm does not change for a model that was built before the patch was applied, or if TransformerEngine is not
installed, because megatron-core then has only one of the two classes.

Other readers of the mark now also treat the sinks as divided: the norm of the parameters, the count of zeros, and
megatron-core's resharding took them for a copy on each rank. Of all checkpoints, only those of Megatron-FSDP depend on
the mark. Without the patch, they contain the sinks of one tensor-parallel rank, and a resumed run has these on all
ranks. With the patch, they contain all sinks. A checkpoint that was saved without the patch does not load with it
(`Size mismatch between saved ... and current ... softmax_offset`), nor the reverse. Continue from weights that have all
sinks, such as those that the training started from, or finish such a run with
`RLHF_PATCHES_DISABLE=megatron-core-attention-sink-norm`.""",
    changes_numbers="""\
Since megatron-core 0.15.0, `grad_norm` lacked (TP - 1)/TP of the sinks' squares. A run whose norms are above
`clip_grad` takes smaller steps with the patch. To keep the step size, multiply its `clip_grad` by the factor by which
`grad_norm` grows at the first step. If the norm stays below `clip_grad`, only the logged value changes.""",
    references=(
        "https://github.com/NVIDIA/Megatron-LM/issues/7452",
        "https://github.com/NVIDIA/Megatron-LM/pull/7530",
    ),
    variants=(
        Variant(
            # main had version 0.20.0 on 2026-08-22, and had the defect; the newest tag was core_v0.19.0.
            Guard("megatron-core", ">=0.15.0rc4,<=0.20.0", co_installed=CoInstalled("transformer-engine", ">=1.0")),
            (
                Rewrite(
                    target="megatron.core.transformer.dot_product_attention:DotProductAttention.__init__",
                    pattern='self.register_parameter("softmax_offset", $SINKS)',
                    replacement='(self.register_parameter("softmax_offset", $SINKS), $MARK(self))',
                    unless=_MARKED,
                    uses={"MARK": f"{__name__}:{mark.__name__}"},
                ),
                Rewrite(
                    target="megatron.core.extensions.transformer_engine:TEDotProductAttention.__init__",
                    pattern="super().__init__",
                    replacement="$MARKING(self, super().__init__)",
                    alongside=('extra_kwargs["softmax_type"] = self.config.softmax_type',),
                    unless=("self.softmax_offset", *_MARKED),
                    uses={"MARKING": f"{__name__}:{marking.__name__}"},
                ),
            ),
            independent=True,
        ),
    ),
    obsolete_when=(
        "when megatron-core marks softmax_offset as tensor_model_parallel (PR #7530); none released so far does"
    ),
    conditions=(
        Condition(
            "megatron.core.transformer.dot_product_attention:DotProductAttention.__init__",
            f"{__package__}._conditions:divided_sinks",
        ),
        Condition(
            "megatron.core.extensions.transformer_engine:TEDotProductAttention.__init__",
            f"{__package__}._conditions:divided_sinks",
        ),
    ),
)
