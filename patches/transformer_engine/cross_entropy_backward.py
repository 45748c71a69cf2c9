"""The fused cross-entropy: each token's gradient is multiplied with the gradient of its own loss."""

from __future__ import annotations

from typing import Any

from rlhf_patches import Guard, Patch, Rewrite, Variant

_BACKWARD = "transformer_engine.pytorch.triton.cross_entropy:cross_entropy_backward"
_USES = {"SCALE": f"{__name__}:scale"}


def scale(gradient: Any, grad_output: Any, kernel: Any = None) -> None:
    """Multiply the gradient that the kernel has left with that of the loss, in place, whatever their strides.

    Nothing is read on the host, so that it can be captured in a CUDA graph. The product is computed in float32 and
    rounded once, to the gradient's dtype.

    Args:
        gradient: ``[B, S, V]`` or ``[S, B, V]``, of the logits.
        grad_output: float32, of the losses: ``[B, S]`` or ``[S, B]`` as the gradient has it, or one element.
        kernel: the kernel that has computed the gradient; None for one that divides only those of a mean.
    """
    if grad_output.numel() != 1:  # or none: a micro-batch without tokens
        factor = grad_output.reshape(*gradient.shape[:-1], 1)
        if kernel is not None and "reduce_loss" not in kernel.arg_names:
            # 2.2.0 to 2.4.0: it has not been told which, and has divided by the number of tokens.
            factor = factor * gradient.shape[:-1].numel()
    else:
        # With a dimension: of two dtypes, a tensor without one does not count.
        factor = grad_output.reshape(1)
    # As the kernel does: without a new version, which would have autograd refuse what it accepts today.
    gradient.data.mul_(factor)  # writes: as the kernel does


PATCH = Patch(
    name="transformer-engine-cross-entropy-backward",
    summary="each token's gradient of the fused cross-entropy is that of its own loss",
    harm="wrong gradient",
    bug="the fused cross-entropy gives every token the gradient of the first token's loss",
    when="--cross-entropy-fusion-impl te, or parallel_cross_entropy(reduce_loss=False)",
    symptom="""\
Megatron with `--cross-entropy-loss-fusion --cross-entropy-fusion-impl te`, or `parallel_cross_entropy` with
`reduce_loss=False`: the loss is right, nothing fails, and the model does not learn, or badly. TransformerEngine 2.2.0
to 2.7.0: the norm of the gradient is 0 where the first token of the batch is masked, as it is where that is a token of
a prompt. 2.8.0 to 2.10.0: gradients are wrong where the micro batch has more than one sequence, and arbitrary, from
memory beyond the tensor, for `loss.sum()`.""",
    cause="""\
`cross_entropy_forward` has computed the gradient of every token, and `cross_entropy_backward` multiplies it with the
gradient of the losses. Up to 2.7.0 its kernel loads that of the first token for all. From 2.8.0 it loads one per token,
as if they followed one another in memory; Megatron transposes the losses from `[S, B]` to `[B, S]`, so the gradients
come back transposed, and those of a sum are one element that stands for all. 2.11.0 makes them contiguous. Besides,
2.2.0 to 2.4.0 divide the gradients by the number of tokens, whether the loss is their mean or not. TransformerEngine's
tests did not see it, since a gradient of 1 is not multiplied with.""",
    repair="""\
The multiplication is one of torch's, in place, each token's row with its own gradient, computed in float32 and rounded
once. It reads nothing on the host, so CUDA graphs (`is_cg_capturable`, 2.7.0 and later) capture it. The factor of 2.2.0
to 2.4.0 is taken back. Gradients of a mean (`reduce_loss=True`) are bit for bit what they were.

Not repaired, since it happens in the kernels before:

- forward overwrites the caller's logits with the gradient (up to 2.17.1), and a second backward of a kept graph
  multiplies once more (up to 2.18.0);
- the mean counts ignored tokens (2.4.0 to 2.11.0); 2.2.0 and 2.3.0 know none, and have an infinite loss for -100;
- logits whose rows do not follow one another in memory are read, and overwritten, at wrong places: a transpose (up to
  2.13.0), `logits[:, :-1]` (up to 2.18.0);
- label smoothing on tensor-parallel ranks: each rank's loss has its own part of the vocabulary only (up to 2.18.0);
- gradients of bfloat16 logits are rounded to bfloat16 two or three times (up to 2.17.1).

Megatron meets the first, whose logits nothing reads again, and the last.""",
    changes_numbers="""\
TransformerEngine 2.2.0 to 2.7.0 gave every token the weight of the first one in its gradient, and 2.8.0 to 2.10.0 those
of other tokens where a micro batch had more than one sequence. A run trained so with the fused cross-entropy of
TransformerEngine has seen another loss than the one it logged, or none: start it again, or at least look for the norm
of its gradients, and choose the learning rate and the clipping anew.""",
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
)
