"""Attention sinks of all tensor-parallel ranks count in the norm of the gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhf_patches import CoInstalled, Condition, Guard, Patch, Rewrite, Variant

from ._conditions import is_own


def mark(attention: Any) -> None:
    """Mark an attention's learnable sinks as divided over tensor-parallel ranks, where they are."""
    if not is_own(attention):  # it may mark them itself, which requires that nothing has
        return
    sinks: Any = dict(attention.named_parameters(recurse=False)).get("softmax_offset")
    divided = sinks is not None and sinks.numel() < attention.config.num_attention_heads
    if divided and not hasattr(sinks, "tensor_model_parallel"):
        sinks.tensor_model_parallel = True  # writes: while the layer is made
        # Asked for wherever a parameter is so marked.
        sinks.partition_dim = 0  # writes: the same
        sinks.partition_stride = 1  # writes: the same


def marking(attention: Any, init: Callable[..., None]) -> Callable[..., None]:
    """``__init__`` of TransformerEngine's attention, which makes the sinks; they are marked after it."""

    def made(*args: Any, **kwargs: Any) -> None:
        init(*args, **kwargs)
        mark(attention)

    return made


#: As PR #7530 does it, which requires that nothing is marked.
_MARKED = ("tensor_parallel.set_tensor_model_parallel_attributes($$$)", "set_tensor_model_parallel_attributes($$$)")

PATCH = Patch(
    name="megatron-core-attention-sink-norm",
    summary="attention sinks of all tensor-parallel ranks count in the norm of the gradient",
    harm="wrong gradient",
    bug="attention sinks of all tensor-parallel ranks but the first are missing from the norm of the gradient",
    when='softmax_type="learnable" (gpt-oss) and tensor_model_parallel_size above 1',
    excluded_by=("tensor_model_parallel_size=1",),
    symptom="""\
A model with learnable attention sinks (gpt-oss, `softmax_type="learnable"`) and `tensor_model_parallel_size` above 1
logs a norm of the gradient that is smaller than that of the same model on one rank: `--clip-grad` lets steps pass that
are too long. Nothing fails.""",
    cause="""\
`DotProductAttention` and `TEDotProductAttention` make `softmax_offset` with a number for each head that the rank has.
In the norm a tensor-parallel rank other than the first counts only parameters that are marked `tensor_model_parallel`,
and neither class marks this one: it is taken for a copy of the first rank's.""",
    repair="""\
Both classes mark the sinks of a layer that is divided while it is made, with the dimension in which they are divided,
as Megatron's linear layers mark their weights. A layer whose heads all are on one rank stays as it is, and so does one
with another `softmax_type`, and so does a class that derives from these elsewhere: it may mark the sinks itself, which
Megatron refuses for what is marked. Code that marks them when a layer is made, with
`set_tensor_model_parallel_attributes`, raises that AssertionError with the patch: remove that code.

A model that was built before the patch was applied keeps its norm, and so does one where TransformerEngine is not
installed, without which megatron-core has only one of the two classes.

What else reads the mark takes the sinks for what they are: the norm of the parameters, the count of zeros, and
megatron-core's resharding, for which they were a copy on each rank. Of checkpoints those of Megatron-FSDP do.
Without the patch these have the sinks of one tensor-parallel rank alone, and a resumed run has those on all ranks. With
it they have all, and one that was saved without it does not load (`Size mismatch between saved ... and current ...
softmax_offset`), nor the reverse. Go on from weights that have all sinks, those that the training started from; or
finish such a run with `RLHF_PATCHES_DISABLE=megatron-core-attention-sink-norm`.""",
    changes_numbers="""\
Since megatron-core 0.15.0 `grad_norm` lacked (TP - 1)/TP of the sinks' squares. A run whose norms are above `clip_grad`
takes smaller steps now: to go on as before, multiply its `clip_grad` by the factor by which `grad_norm` grows at the
first step. Where the norm stays below, nothing changes but what is logged.""",
    references=(
        "https://github.com/NVIDIA/Megatron-LM/issues/7452",
        "https://github.com/NVIDIA/Megatron-LM/pull/7530",
    ),
    variants=(
        Variant(
            # main called itself 0.20.0 when it was read (2026-08-22) and had the defect; the newest tag was
            # core_v0.19.0.
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
