"""Experts of a grouped layer count in the gradient norm on each tensor-parallel rank."""

from __future__ import annotations

from typing import Any

from rlhf_patches import CoInstalled, Condition, Guard, Patch, Rewrite, Variant

from ._conditions import is_own


def allreduced(layer: Any, parameter: Any, value: bool) -> bool:
    """Mark a parameter of a grouped layer as one that no other tensor-parallel rank has, if that is the case.

    Args:
        layer: a ``TEGroupedLinear`` that is being built.
        parameter: one of its own.
        value: the future value of the parameter's ``allreduce``.

    Returns:
        ``value``.
    """
    # Without explicit expert communication, all ranks have the same experts. TransformerEngine before 2.13, or with
    # weights in one piece, has marked them. Biases exist only for experts that are not divided.
    # A subclass defined elsewhere may mark them itself, which requires that they are unmarked.
    if layer.explicit_expert_comm and is_own(layer) and not hasattr(parameter, "tensor_model_parallel"):
        # known: megatron-core's class, which exists with TransformerEngine only
        row = any(kind.__name__ == "TERowParallelGroupedLinear" for kind in type(layer).__mro__)
        parameter.tensor_model_parallel = True  # writes: while the layer is built
        # Read wherever a parameter has this mark.
        parameter.partition_dim = 1 if row and parameter.dim() > 1 else 0  # writes: as above
        parameter.partition_stride = 1  # writes: as above
    return value


PATCH = Patch(
    name="megatron-core-grouped-experts-norm",
    summary="experts count in the gradient norm on each tensor-parallel rank",
    harm="wrong gradient",
    bug="the gradient norm omits the experts of all tensor-parallel ranks but the first",
    when="TransformerEngine 2.13 or later, --moe-grouped-gemm, tensor_model_parallel_size above 1, and "
    "expert_model_parallel_size or expert_tensor_parallel_size above 1",
    excluded_by=("tensor_model_parallel_size=1",),
    symptom="""\
A mixture of experts with `tensor_model_parallel_size` above 1 logs a gradient norm that is smaller than that of the
same model on one rank, and smaller than with TransformerEngine before 2.13. `--clip-grad` does not clip steps that are
too large. No error is raised.""",
    cause="""\
A tensor-parallel rank other than the first counts only parameters that are marked `tensor_model_parallel` in the norm.
`TEGroupedLinear` leaves the marking to TransformerEngine's `GroupedLinear`. `GroupedLinear` marks its weights up to
2.12.0, and since 2.13.0 only if they are in one piece (`single_grouped_weight`).""",
    repair="""\
`TEGroupedLinear` marks weights and biases that no other tensor-parallel rank has, with the dimension in which they are
divided, if TransformerEngine has not. The patch does not change a layer whose experts are on all ranks. It does not
change a subclass that is defined outside Megatron: the subclass may mark the parameters itself, and Megatron raises for
a parameter that is already marked. Code that marks the parameters while a layer is built, with
`set_tensor_model_parallel_attributes`, raises this AssertionError with the patch: remove that code.

Megatron-FSDP of megatron-core 0.15 and older uses the mark for its checkpoints. With the patch, these checkpoints are
as with TransformerEngine 2.12. A checkpoint that was saved without the patch does not load with it (`Size mismatch
between saved ... and current`), nor the reverse: finish such a run with
`RLHF_PATCHES_DISABLE=megatron-core-grouped-experts-norm`.""",
    changes_numbers="""\
Since TransformerEngine 2.13.0, `grad_norm` lacked (TP - 1)/TP of the experts' squares. A run whose norms are above
`clip_grad` takes smaller steps with the patch, as it did with TransformerEngine 2.12. To keep the step size, multiply
its `clip_grad` by the factor by which `grad_norm` grows at the first step. If the norm stays below `clip_grad`, only
the logged value changes.""",
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
