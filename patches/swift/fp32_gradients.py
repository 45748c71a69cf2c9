"""ms-swift's Megatron trainers accumulate gradients in the configured precision."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_TARGET = "swift.megatron.utils.megatron_lm_utils:wrap_model"

PATCH = Patch(
    name="swift-fp32-gradients",
    summary="Megatron accumulates gradients in float32 if configured, which is the default in bfloat16",
    harm="wrong gradient",
    bug=(
        "gradients are accumulated in bfloat16, over micro-batches and ranks, despite "
        "accumulate_allreduce_grads_in_fp32"
    ),
    when="megatron sft, pt or rlhf in bfloat16, and several micro-batches or data-parallel ranks",
    excluded_by=("bf16=false", "main_grads_dtype=bf16"),
    symptom="""\
Megatron training in bfloat16 with many micro-batches per step (`global_batch_size` far above `micro_batch_size`) learns
slightly worse than with few, or than with ms-swift 3: the gradient error is 1 % at 64 micro-batches, and grows with
each further one. No error is raised. `--accumulate_allreduce_grads_in_fp32 true` has no effect.""",
    cause="""\
`wrap_model` copies the arguments that have the name of a field of DistributedDataParallelConfig. The field for this
argument is named `grad_reduce_in_fp32`, so it keeps its default of False, and gradients are in buffers of the
parameters' dtype. Each addition of a small gradient to the accumulated sum loses the last digits of the small one.""",
    repair="""\
The patch sets `grad_reduce_in_fp32` to `accumulate_allreduce_grads_in_fp32`. In bfloat16, ms-swift sets this argument
to True itself, unless `main_grads_dtype` is another dtype. In float16 it is False by default. Float32 training
accumulates in float32 in any case. If you have put a class of your own in place of `DistributedDataParallelConfig`, the
argument takes precedence over the default of your class. The buffers need 4 bytes instead of 2 per trainable parameter,
and reductions send twice as much.""",
    changes_numbers="""\
ms-swift 4.0.0 to 4.3.1 accumulated Megatron's gradients in bfloat16: each has an error of about 1 % at 64
micro-batches, random and biased towards smaller values. With the patch, sums are exact to float32. No learning rate
depends on it. Memory grows by 2 bytes per trainable parameter: if a run barely fits, use `--main_grads_dtype bf16`,
which needs `--use_precision_aware_optimizer true`, to keep the released behavior.

Training can continue from checkpoints, except for the optimizer's state in the default format, dp_reshardable. The
state is saved under the name of the sums' dtype, so a run does not resume from a checkpoint that was saved without the
patch ("Missing key in checkpoint state_dict"), nor the reverse; the same holds from 4.3.1 to 4.3.2. Finish such a run
with `RLHF_PATCHES_DISABLE=swift-fp32-gradients`; `--dist_ckpt_optim_fully_reshardable true` saves checkpoints that
either can load.""",
    references=("https://github.com/modelscope/ms-swift/pull/9590",),
    variants=(
        Variant(
            Guard("ms-swift", ">=4.0.0,<4.3.2"),
            (
                Rewrite(
                    target=_TARGET,
                    pattern="DistributedDataParallelConfig(**kwargs)",
                    alongside=("kwargs[f.name] = getattr(args, f.name)",),
                    unless=("kwargs['grad_reduce_in_fp32'] = $FLAG",),
                    # A value in `args` under the field's own name has precedence.
                    replacement=(
                        "DistributedDataParallelConfig(**{'grad_reduce_in_fp32':"
                        " bool(getattr(args, 'accumulate_allreduce_grads_in_fp32', False)), **kwargs})"
                    ),
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest ms-swift in use is 4.3.2",
    conditions=(Condition(_TARGET, f"{__package__}._conditions:reduces_in_half"),),
)
