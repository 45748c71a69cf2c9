"""megatron-core: fully_reshardable checkpoints of the distributed optimizer, and the padding between buckets."""

from __future__ import annotations

from itertools import islice
from typing import Any

from rlhf_patches import Guard, Patch, Rewrite, Variant


def padding_before(buffer: Any, parameter: Any) -> int:
    """How many elements of padding are at the ends of the buckets before a parameter's own.

    Args:
        buffer: megatron-core's _ParamAndGradBuffer; it has each parameter's start, end and bucket.
        parameter: one of the buffer's.
    """
    _, _, bucket = buffer.param_index_map[parameter]
    return sum(one.grad_data.numel() - one.numel_unpadded for one in islice(buffer.buckets, bucket))


REWRITES = (
    Rewrite(
        target="megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.sharded_param_state_fully_reshardable",
        pattern="world_tensors[state_key][param_world_start:param_world_end]",
        alongside=("world_tensors = dp_zero_state_dict[gbuf_idx][dtype]", "buffer = self.buffers[gbuf_idx]"),
        replacement="world_tensors[state_key][param_world_start - $PADDING(buffer, model_param):"
        "param_world_end - $PADDING(buffer, model_param)]",
        uses={"PADDING": f"{__name__}:{padding_before.__name__}"},
    ),
)

PATCH = Patch(
    name="megatron-core-reshardable-buckets",
    summary="a fully_reshardable checkpoint has each parameter's own master weight and moments",
    harm="wrong weights",
    bug="a fully_reshardable checkpoint has another part of the optimizer's state for each parameter",
    when="--dist-ckpt-optim-fully-reshardable, and gradients in several buckets (overlap_grad_reduce)",
    excluded_by=("overlap_grad_reduce=false",),
    symptom="""\
A run that resumes from a `fully_reshardable` checkpoint (`--dist-ckpt-optim-fully-reshardable`;
`distrib_optim_sharding_type` in the metadata) goes on with wrong float32 weights and moments, whether or not the number
of ranks has changed. Its first step overwrites the model with them. There is no error. If padding has pushed a
parameter past the end, a warning was logged when it was saved: "param range exceeds unpadded buffer".""",
    cause="""\
With `overlap_grad_reduce`, or where embeddings are shared, gradients are in several buckets, and with the distributed
optimizer each bucket's end is padded to a multiple of 128 elements and of the number of ranks. The state is gathered
without this padding, and each parameter is then looked for where it would be with it. So it is taken from as many
elements too far on as the buckets before its own are padded, and what lies behind the end is zero. With
`pad_buckets_for_high_nccl_busbw` this can be 65535 elements for each bucket.""",
    repair="""\
Each parameter's state is taken from its own place, less the padding of the buckets before its own, when a checkpoint is
saved. The format is the same. Loading is as before, with the patch and without, for every checkpoint.

A checkpoint that was saved without the patch stays wrong, and loading it with the patch gives what it gave: what lies
at each bucket's beginning and at the end was never saved, and how the buckets were padded is not in it. Its model
weights are right: resume from it without optimizer state (`--no-load-optim`), or from one in another format.

With one bucket, and where nothing is padded, a checkpoint is as before, bit for bit.""",
    changes_numbers="""\
Since megatron-core 0.15.0, the first with this format, each resume from such a checkpoint went on from shifted master
weights and moments. With the patch a resumed run is the one that was not interrupted. What was trained after such a
resume was trained from wrong weights.""",
    references=("https://github.com/NVIDIA/Megatron-LM/pull/5077",),
    # main called itself 0.20.0 when it was read (2026-08-22) and had the repair; the newest release had not.
    variants=(Variant(Guard("megatron-core", ">=0.15.0rc0,<=0.19.2"), REWRITES),),
    obsolete_when="when the oldest megatron-core in use is 0.20",
)
