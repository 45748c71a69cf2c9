"""The fused cross-entropy: multiply each token's gradient by the gradient of its own loss."""

from __future__ import annotations

from typing import Any

import rlhf_patches
from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_NAME = "transformer-engine-cross-entropy-backward"
_BACKWARD = "transformer_engine.pytorch.triton.cross_entropy:cross_entropy_backward"
_USES = {"SCALE": f"{__name__}:scale"}


def scale(gradient: Any, grad_output: Any, kernel: Any = None) -> None:
    """Multiply the kernel's gradient by the gradient of the loss, in place, for any strides.

    The host reads nothing, so a CUDA graph can capture the call. The product is computed in float32 and rounded once,
    to the gradient's dtype.

    Args:
        gradient: the logits' gradient, ``[B, S, V]`` or ``[S, B, V]``.
        grad_output: the losses' gradient, float32: ``[B, S]`` or ``[S, B]`` like ``gradient``, or one element.
        kernel: the kernel that has computed the gradient; None for a kernel that divides only for a mean.
    """
    occurs = _occurs(grad_output, kernel)
    if occurs is not None:
        rlhf_patches.decided(_NAME, occurs)
    if grad_output.numel() != 1:  # or 0: a micro-batch without tokens
        factor = grad_output.reshape(*gradient.shape[:-1], 1)
        if kernel is not None and "reduce_loss" not in kernel.arg_names:
            # 2.2.0 to 2.4.0: the kernel does not know the reduction, and has divided by the number of tokens.
            factor = factor * gradient.shape[:-1].numel()
    else:
        # With a dimension: type promotion ignores the dtype of a tensor without one.
        factor = grad_output.reshape(1)
    # Like the kernel, without a new version, with which autograd would refuse graphs that it accepts today.
    gradient.data.mul_(factor)  # writes: as the kernel does


def _occurs(grad_output: Any, kernel: Any) -> bool | None:
    """Whether the released code has a wrong gradient, from shapes and strides; None where values would decide."""
    if grad_output.numel() <= 1:
        return False
    if kernel is None:  # 2.8.0 and later read one number per token, as if it were contiguous
        return not grad_output.is_contiguous()
    if "reduce_loss" not in kernel.arg_names:
        return True
    # 2.5.0 to 2.7.0 take the first number for all tokens, which is right for an expanded one.
    return None if any(grad_output.stride()) else False


PATCH = Patch(
    name=_NAME,
    summary="the fused cross-entropy gives each token the gradient of its own loss",
    harm="wrong gradient",
    bug="the fused cross-entropy gives every token the gradient of the first token's loss",
    when="--cross-entropy-fusion-impl te, or parallel_cross_entropy(reduce_loss=False)",
    symptom="""\
Megatron with `--cross-entropy-loss-fusion --cross-entropy-fusion-impl te`, or `parallel_cross_entropy` with
`reduce_loss=False`: the loss is right, there is no error, and the model learns badly or not at all. TransformerEngine
2.2.0 to 2.7.0: the norm of the gradient is 0 where the first token of the batch is masked, as a token of a prompt is.
2.8.0 to 2.10.0: gradients are wrong where the micro-batch has more than one sequence, and arbitrary, from memory beyond
the tensor, for `loss.sum()`.""",
    cause="""\
`cross_entropy_forward` has computed the gradient of every token, and `cross_entropy_backward` multiplies it by the
gradient of the losses. Up to 2.7.0 its kernel loads the first token's gradient for all tokens. From 2.8.0 the kernel
loads one gradient per token and assumes contiguous memory. Megatron transposes the losses from `[S, B]` to `[B, S]`, so
the gradients are transposed, and the gradients of a sum are one expanded element. 2.11.0 makes them contiguous. In
addition, 2.2.0 to 2.4.0 divide the gradients by the number of tokens, even if the loss is not their mean.
TransformerEngine's tests did not detect the bug, since the kernel is skipped for a gradient of 1.""",
    repair="""\
The patch multiplies each token's row in place by that token's own gradient. It uses torch's own operator, in float32,
and rounds once. The host reads nothing, so CUDA graphs (`is_cg_capturable`, 2.7.0 and later) capture the call. The
patch reverts the factor of 2.2.0 to 2.4.0. Gradients of a mean (`reduce_loss=True`) are bitwise identical.

Not repaired, because these errors occur in earlier kernels:

- forward overwrites the caller's logits with the gradient (up to 2.17.1), and a second backward of a retained graph
  multiplies once more (up to 2.18.0);
- the mean counts ignored tokens (2.4.0 to 2.11.0); 2.2.0 and 2.3.0 support none, and have an infinite loss for -100;
- logits whose rows are not contiguous in memory are read, and overwritten, at wrong positions: a transpose (up to
  2.13.0), `logits[:, :-1]` (up to 2.18.0);
- label smoothing on tensor-parallel ranks: each rank's loss has its own part of the vocabulary only (up to 2.18.0);
- gradients of bfloat16 logits are rounded to bfloat16 two or three times (up to 2.17.1).

Of these, the first and the last affect Megatron. The first does no harm there, because nothing reads its logits
again.""",
    changes_numbers="""\
TransformerEngine 2.2.0 to 2.7.0 gave every token the weight of the first token in its gradient, and 2.8.0 to 2.10.0
gave tokens the weights of other tokens where a micro-batch had more than one sequence. A run that was trained with this
fused cross-entropy minimized another loss than the logged one, or none: restart it, or at least check the norm of its
gradients, and choose the learning rate and the clipping again.""",
    references=(
        "https://github.com/NVIDIA/TransformerEngine/pull/2139",
        "https://github.com/NVIDIA/TransformerEngine/pull/2402",
        "https://github.com/NVIDIA/TransformerEngine/pull/1879",
        "https://github.com/NVIDIA/Megatron-LM/issues/1750",
        "https://github.com/ROCm/TransformerEngine/pull/336",
    ),
    variants=(
        Variant(
            Guard("transformer-engine", ">=2.2.0,<2.8.0"),
            (
                Rewrite(
                    target=_BACKWARD,
                    pattern="element_mul_kernel[(n_rows,)](_input, _input.stride(-2), grad_output, V, "
                    "BLOCK_SIZE=BLOCK_SIZE, num_warps=32)",
                    replacement="$SCALE(_input, grad_output, cross_entropy_kernel)",
                    uses=_USES,
                ),
            ),
        ),
        Variant(
            Guard("transformer-engine", ">=2.8.0,<2.11.0"),
            (
                Rewrite(
                    target=_BACKWARD,
                    pattern="element_mul_kernel[(n_rows,)](_input, _input.stride(-2), grad_output, "
                    "1 if grad_output.numel() > 1 else 0, V, BLOCK_SIZE=BLOCK_SIZE, num_warps=32)",
                    replacement="$SCALE(_input, grad_output)",
                    uses=_USES,
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest TransformerEngine in use is 2.11.0",
    conditions=(Condition(_BACKWARD),),
)
