"""Experts of a grouped layer count in the norm of the gradient on each tensor-parallel rank."""

from __future__ import annotations

from typing import Any

from rlhf_patches import CoInstalled, Condition, Guard, Patch, Rewrite, Variant

from ._conditions import is_own


def allreduced(layer: Any, parameter: Any, value: bool) -> bool:
    """Mark a parameter of a grouped layer as one that no other tensor-parallel rank has, where that is so.

    Args:
        layer: a ``TEGroupedLinear`` that is being made.
        parameter: one of its own.
        value: what ``allreduce`` of the parameter becomes.

    Returns:
        ``value``.
    """
    # Without communication of their own, all ranks have the same experts. TransformerEngine before 2.13, or with
    # weights in one piece, has marked them. Biases there are only with experts that are not divided.
    # A class that derives from it elsewhere may mark them itself, which requires that nothing has.
    if layer.explicit_expert_comm and is_own(layer) and not hasattr(parameter, "tensor_model_parallel"):
        # known: megatron-core's class, which is there with TransformerEngine only
        row = any(kind.__name__ == "TERowParallelGroupedLinear" for kind in type(layer).__mro__)
        parameter.tensor_model_parallel = True  # writes: while the layer is made
        # Asked for wherever a parameter is so marked.
        parameter.partition_dim = 1 if row and parameter.dim() > 1 else 0  # writes: the same
        parameter.partition_stride = 1  # writes: the same
    return value


PATCH = Patch(
    name="megatron-core-grouped-experts-norm",
    summary="experts count in the norm of the gradient on each tensor-parallel rank",
    harm="wrong gradient",
    bug="experts of all tensor-parallel ranks but the first are missing from the norm of the gradient",
    when="TransformerEngine 2.13 or later, --moe-grouped-gemm, tensor_model_parallel_size above 1, and "
    "expert_model_parallel_size or expert_tensor_parallel_size above 1",
    excluded_by=("tensor_model_parallel_size=1",),
    symptom="""\
A mixture with `tensor_model_parallel_size` above 1 logs a norm of the gradient that is smaller than that of the same
model on one rank, and than it was before TransformerEngine was brought up to 2.13: `--clip-grad` lets steps pass that
are too long. Nothing fails.""",
    cause="""\
In the norm a tensor-parallel rank other than the first counts only parameters that are marked `tensor_model_parallel`.
`TEGroupedLinear` leaves that to TransformerEngine's `GroupedLinear`, which has marked its weights up to 2.12.0, and
since 2.13.0 marks them only where they lie in one piece (`single_grouped_weight`).""",
    repair="""\
`TEGroupedLinear` marks weights and biases that no other tensor-parallel rank has, with the dimension in which they are
divided, where TransformerEngine has not. A layer whose experts all ranks have stays as it is. So does a class that
derives from Megatron's elsewhere: it may mark them itself, which Megatron refuses for what is marked. Code that marks
them when a layer is made, with `set_tensor_model_parallel_attributes`, raises that AssertionError with the patch:
remove that code.

Megatron-FSDP of megatron-core 0.15 and older reads the mark for its checkpoints, which are as with TransformerEngine
2.12 then. One that was saved without the patch does not load with it (`Size mismatch between saved ... and current`),
nor the reverse: finish such a run with `RLHF_PATCHES_DISABLE=megatron-core-grouped-experts-norm`.""",
    changes_numbers="""\
Since TransformerEngine 2.13.0 `grad_norm` lacked (TP - 1)/TP of the experts' squares. A run whose norms are above
`clip_grad` takes smaller steps now, as it did with TransformerEngine 2.12: to go on as before, multiply its `clip_grad`
by the factor by which `grad_norm` grows at the first step. Where the norm stays below, nothing changes but what is
logged.""",
    references=(
        "https://github.com/NVIDIA/Megatron-LM/pull/5916",
        "https://github.com/NVIDIA/Megatron-LM/issues/7452",
    ),
    variants=(
        Variant(
            Guard(
                "megatron-core", ">=0.9.0,<0.19.0", co_installed=CoInstalled("transformer-engine", ">=2.13.0,<=2.20.2")
            ),
            (
                Rewrite(
                    target="megatron.core.extensions.transformer_engine:TEGroupedLinear.__init__",
                    pattern="not (is_expert and self.expert_parallel)",
                    replacement="$MARK(self, param, not (is_expert and self.expert_parallel))",
                    uses={"MARK": f"{__name__}:{allreduced.__name__}"},
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest megatron-core in use is 0.19.0",
    conditions=(
        Condition(
            "megatron.core.extensions.transformer_engine:TEGroupedLinear.__init__",
            f"{__package__}._conditions:experts_of_a_rank",
        ),
    ),
)
