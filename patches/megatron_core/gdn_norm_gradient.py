"""The gradient of a Gated DeltaNet's norm is the sum over the tensor-parallel ranks that have its heads."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_LAYERS = "megatron.core.ssm.gated_delta_net"
_MARKS = f"{__package__}._gated_delta_nets"


def _changes(layer: str) -> tuple[Rewrite, ...]:
    """The layer, as ``module:Class``, and what sums gradients over tensor-parallel ranks."""
    return (
        Rewrite(
            target=f"{layer}.__init__",
            pattern="self.reset_parameters()",
            replacement="($MARK(self, self.out_norm, self.tp_size), self.reset_parameters())",
            alongside=("self.out_norm = build_module(submodules.out_norm, $$$ARGUMENTS)",),
            uses={"MARK": f"{_MARKS}:mark"},
        ),
        Rewrite(
            target="megatron.core.distributed.finalize_model_grads:_allreduce_non_tensor_model_parallel_grads",
            pattern="config.qk_layernorm and $NAMED",
            replacement="(config.qk_layernorm and $NAMED) or $IS_MARKED(param)",
            uses={"IS_MARKED": f"{_MARKS}:is_marked"},
        ),
    )


PATCH = Patch(
    name="megatron-core-gdn-norm-gradient",
    summary="a Gated DeltaNet's norm has the gradient of all heads where ranks have some each",
    harm="wrong gradient",
    bug="a Gated DeltaNet's norm has the gradient of its own rank's heads alone, and the ranks' copies drift apart",
    when="Qwen3-Next, Qwen3.5 and others with Gated DeltaNets, tensor parallelism, and no sequence parallelism",
    excluded_by=("tensor_model_parallel_size=1", "sequence_parallel=true"),
    symptom="""\
A model with Gated DeltaNets (Qwen3-Next, Qwen3.5) under tensor parallelism without sequence parallelism
(`--tensor-model-parallel-size 2` or more, no `--sequence-parallel`) does not train as without tensor parallelism.
There is no error. `linear_attn.norm.weight` of each such layer (`self_attention.out_norm.weight`) is a copy on every
tensor-parallel rank, and the copies part at the first step: each rank computes another model from then on, and a
checkpoint or the engine that samples gets the copy of rank 0.""",
    cause="""\
`GatedDeltaNet.out_norm` is one weight for all heads, and each rank has some of the heads. Its gradient on a rank is
that of these, a part of the sum. `_allreduce_non_tensor_model_parallel_grads` in `finalize_model_grads` sums such
parts over the tensor-parallel ranks for parameters that sequence parallelism marks, and for `q_layernorm` and
`k_layernorm` by their names; not for this one.""",
    repair="""\
A `GatedDeltaNet` that is divided over ranks, mcore-bridge's too, marks the weight of its `out_norm` when it is built,
and the same sum takes in what is marked. Nothing else: with sequence parallelism Megatron sums it already, and every
gradient is as before, bit for bit; so is it without tensor parallelism, and for other layers' norms. A model that was
built before the patch was applied keeps its gradients, and so does one under Megatron-FSDP, which copies other marks
than this one to the parameters that are summed.

Your own repair may be in your own class of the layer or of its norm, or in a hook on its weight: all three keep their
gradients. What cannot be seen sums it twice: code that sums `main_grad` after `finalize_model_grads`, or that changes
the norm's forward after the layer was built. Remove it.

Where nothing else was to be summed the ranks have one all-reduce more per step, of as many numbers as a head is wide
for each layer.""",
    changes_numbers="""\
the gradient of `out_norm` was wrong on each rank, by about its own norm with two ranks and more with more, since
megatron-core 0.16.0, the first with Gated DeltaNets; all other gradients were those of the model as each rank had it.
Copies that have parted stay apart: go on from a checkpoint, which has rank 0's copy for all, and not from memory. The
gradient of this weight is a sum over all heads now: with SGD it moves further, with Adam in another direction.""",
    references=("https://github.com/NVIDIA/Megatron-LM/issues/7452",),
    # main called itself 0.20.0 when it was read (2026-08-22) and had the defect; the newest tag was core_v0.19.0.
    variants=(
        Variant(Guard("megatron-core", ">=0.16.0,<=0.18.2"), _changes(f"{_LAYERS}:GatedDeltaNet")),
        Variant(Guard("megatron-core", ">=0.19.0,<=0.20.0"), _changes(f"{_LAYERS}.common:_GDNBase")),
    ),
    obsolete_when="when finalize_model_grads sums the gradient of GatedDeltaNet.out_norm; none released so far does",
    conditions=(
        Condition(
            "megatron.core.ssm.gated_delta_net:GatedDeltaNet.__init__", f"{__package__}._conditions:heads_of_a_rank"
        ),
        Condition(
            "megatron.core.ssm.gated_delta_net.common:_GDNBase.__init__", f"{__package__}._conditions:heads_of_a_rank"
        ),
    ),
)
