"""ms-swift's Megatron trainers: gradients add up in the precision that the arguments say."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Rewrite, Variant

PATCH = Patch(
    name="swift-fp32-gradients",
    summary="Megatron's gradients add up in float32 where the arguments say so, as they do by default in bfloat16",
    harm="wrong gradient",
    bug="gradients add up in bfloat16, over micro-batches and ranks, whatever accumulate_allreduce_grads_in_fp32 says",
    when="megatron sft, pt or rlhf in bfloat16, and several micro-batches or data-parallel ranks",
    excluded_by=("bf16=false", "main_grads_dtype=bf16"),
    symptom="""\
Megatron training in bfloat16 with many micro-batches in a step (`global_batch_size` far above `micro_batch_size`)
learns a little worse than with few, or than ms-swift 3: gradients are off by 1 % at 64 micro-batches, and by more with
each further one. No error; `--accumulate_allreduce_grads_in_fp32 true` changes nothing.""",
    cause="""\
`wrap_model` takes over the arguments that have the name of one of DistributedDataParallelConfig's fields. There this
one is called `grad_reduce_in_fp32`, so it stays False, its default, and gradients lie in buffers of the parameters'
type. The sum of a small gradient and of what was added up before loses the small one's last digits each time.""",
    repair="""\
`grad_reduce_in_fp32` is what `accumulate_allreduce_grads_in_fp32` says. In bfloat16 ms-swift sets that itself, unless
`main_grads_dtype` is another; in float16 it is False unless it is asked for, and float32 adds up in float32 anyway.
The buffers take 4 bytes for each trainable parameter in place of 2, and reductions send as much more.""",
    changes_numbers="""\
ms-swift 4.0.0 to 4.3.1 added up Megatron's gradients in bfloat16: each is off by some 1 % at 64 micro-batches, at
random and towards less. With the patch sums are exact to float32. No learning rate depends on it; memory does, by 2
bytes for each trainable parameter: a run that only just fits can go on as before with `--main_grads_dtype bf16`, which
needs `--use_precision_aware_optimizer true`.

Checkpoints can be trained on, but for the optimizer's state in the default format, dp_reshardable: it is kept under the
name of the sums' type, so that a run does not resume from one that was saved without the patch ("Missing key in
checkpoint state_dict"), nor the reverse, as from 4.3.1 to 4.3.2. Finish such a run with
`RLHF_PATCHES_DISABLE=swift-fp32-gradients`; `--dist_ckpt_optim_fully_reshardable true` saves what either can load.""",
    references=("https://github.com/modelscope/ms-swift/pull/9590",),
    variants=(
        Variant(
            Guard("ms-swift", ">=4.0.0,<4.3.2"),
            (
                Rewrite(
                    target="swift.megatron.utils.megatron_lm_utils:wrap_model",
                    pattern="DistributedDataParallelConfig(**kwargs)",
                    alongside=("kwargs[f.name] = getattr(args, f.name)",),
                    unless=("kwargs['grad_reduce_in_fp32'] = $FLAG",),
                    # What `args` has under the field's own name comes first.
                    replacement=(
                        "DistributedDataParallelConfig(**{'grad_reduce_in_fp32':"
                        " bool(getattr(args, 'accumulate_allreduce_grads_in_fp32', False)), **kwargs})"
                    ),
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest ms-swift in use is 4.3.2",
)
