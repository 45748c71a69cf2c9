"""megatron-core: fully_reshardable checkpoints of the distributed optimizer, and the padding between buckets."""

from __future__ import annotations

from itertools import islice
from typing import Any

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant


def padding_before(buffer: Any, parameter: Any) -> int:
    """The number of padding elements at the ends of the buckets before a parameter's own.

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
    bug="a fully_reshardable checkpoint has a shifted part of the optimizer's state for each parameter",
    when="--dist-ckpt-optim-fully-reshardable, and gradients in several buckets: overlap_grad_reduce, or embeddings "
    "that pipeline stages share",
    symptom="""\
A run that resumes from a `fully_reshardable` checkpoint (`--dist-ckpt-optim-fully-reshardable`;
`distrib_optim_sharding_type` in the metadata) has wrong float32 weights and moments, whether or not the number of ranks
has changed. Its first step overwrites the model with them. No error is raised. If padding moved a parameter past the
end, saving logged a warning: "param range exceeds unpadded buffer".""",
    cause="""\
With `overlap_grad_reduce`, or with embeddings that pipeline stages share, gradients are in several buckets. With the
distributed optimizer, each bucket's end is padded to a multiple of 128 elements and of the number of ranks. The state
is gathered without this padding, but each parameter is located by its padded position. Its state is therefore taken too
far on, by the padding of the buckets before its own, and is zero past the end. With `pad_buckets_for_high_nccl_busbw`,
the padding can be 65535 elements for each bucket.""",
    repair="""\
When a checkpoint is saved, each parameter's state is taken from its own position, less the padding of the buckets
before its own. The format is the same. Loading is as before for every checkpoint, whether it was saved with the patch
or without.

The patch does not repair a checkpoint that was saved without it: the state at each bucket's beginning and at the end
was never saved, and the checkpoint does not record how the buckets were padded. Its model weights are right: resume
from it without optimizer state (`--no-load-optim`), or from a checkpoint in another format.

With one bucket, and without padding, checkpoints are bitwise identical.""",
    changes_numbers="""\
Since megatron-core 0.15.0, the first release with this format, each resume from such a checkpoint used shifted master
weights and moments. With the patch, a resumed run equals one that was not interrupted. Training after such a resume
started from wrong weights.""",
    references=("https://github.com/NVIDIA/Megatron-LM/pull/5077",),
    # main had version 0.20.0 on 2026-08-22, and had the repair; the newest release had not.
    variants=(Variant(Guard("megatron-core", ">=0.15.0rc0,<=0.19.2"), REWRITES),),
    obsolete_when="when the oldest megatron-core in use is 0.20",
    conditions=(Condition(REWRITES[0].target, f"{__package__}._conditions:saves_shifted_states"),),
)
