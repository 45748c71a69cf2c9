"""The gradient of a Gated DeltaNet's norm is the sum over the tensor-parallel ranks that have its heads."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_LAYERS = "megatron.core.ssm.gated_delta_net"
_MARKS = f"{__package__}._gated_delta_nets"


def _changes(layer: str) -> tuple[Rewrite, ...]:
    """The layer, as ``module:Class``, and the function that sums gradients over tensor-parallel ranks."""
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
    summary="a Gated DeltaNet's norm has the gradient of all heads if each rank has some of them",
    harm="wrong gradient",
    bug="a Gated DeltaNet's norm has the gradient of its own rank's heads only, and the ranks' copies diverge",
    when="Qwen3-Next, Qwen3.5 and others with Gated DeltaNets, tensor parallelism, and no sequence parallelism",
    excluded_by=("tensor_model_parallel_size=1", "sequence_parallel=true"),
    symptom="""\
A model with Gated DeltaNets (Qwen3-Next, Qwen3.5) under tensor parallelism without sequence parallelism
(`--tensor-model-parallel-size 2` or more, no `--sequence-parallel`) trains differently than without tensor parallelism.
No error is raised. `linear_attn.norm.weight` of each such layer (`self_attention.out_norm.weight`) is a copy on every
tensor-parallel rank, and the copies diverge at the first step. From then on each rank computes another model, and a
checkpoint or the rollout engine gets the copy of rank 0.""",
    cause="""\
`GatedDeltaNet.out_norm` is one weight for all heads, and each rank has some of the heads. The weight's gradient on a
rank covers these heads, a part of the sum. `_allreduce_non_tensor_model_parallel_grads` in `finalize_model_grads` sums
such parts over the tensor-parallel ranks for parameters that sequence parallelism marks, and for `q_layernorm` and
`k_layernorm` by name. It does not sum them for `out_norm`.""",
    repair="""\
A `GatedDeltaNet` that is divided over ranks, including mcore-bridge's, marks the weight of its `out_norm` when it is
built, and the same sum includes marked weights. With sequence parallelism, Megatron already sums the gradient. In that
case, and without tensor parallelism, every gradient stays as released, bit for bit. So do those of other layers' norms.
The patch does not change a model that was built before the patch was applied, or a model under Megatron-FSDP, which
does not copy this mark to the parameters that are summed.

The patch does not change gradients if your own repair is in your own class of the layer or of its norm, or in a hook on
its weight. Other repairs are not detected, and the gradient is then summed twice: code that sums `main_grad` after
`finalize_model_grads`, or that changes the norm's forward after the layer was built. Remove such code.

If no other gradient has to be summed, the ranks run one additional all-reduce per step. For each layer, it has as many
numbers as a head is wide.""",
    changes_numbers="""\
Since megatron-core 0.16.0, the first release with Gated DeltaNets, the gradient of `out_norm` was wrong on each rank,
by about its own norm with two ranks and by more with more ranks. All other gradients were right for the model as each
rank had it. Copies that have diverged stay different: continue from a checkpoint, which has rank 0's copy for all
ranks, and not from memory. With the patch, the gradient of this weight is a sum over all heads: with SGD the weight
moves further, with Adam in another direction.""",
    references=("https://github.com/NVIDIA/Megatron-LM/issues/7452",),
    # main had version 0.20.0 on 2026-08-22, and had the defect; the newest tag was core_v0.19.0.
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
