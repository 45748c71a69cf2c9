"""transformers: expert parallelism gives routers a gradient without the part of the other ranks' experts."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_HOOKS = "transformers.integrations.tensor_parallel"
_LAYERS = "transformers.distributed.tensor_parallel"  # since 5.16.0
_OURS = f"{__package__}._expert_weights"
_EXPERTS = (
    f"{_HOOKS}:MoeTensorParalellExperts._prepare_input_fn",
    f"{_LAYERS}:MoeExpertsParallel.transform_inputs_pre_forward",
)


def _summed_first(router: str, experts: str, summed: str, group: str) -> tuple[Rewrite, ...]:
    """The router's mask, and the sum of the experts' gradient for its weights."""
    return (
        Rewrite(
            target=router,
            pattern="router_scores.masked_fill(non_local_mask, 0.0)",
            replacement="$MASKED(router_scores, non_local_mask)",
            unless=("_AllReduceBackward.apply(router_scores, $$$)",),
            uses={"MASKED": f"{_OURS}:masked"},
        ),
        Rewrite(
            target=experts,
            pattern=f"{summed}(top_k_weights, {group})",
            replacement=f"$SUMMED({summed}, top_k_weights, {group})",
            uses={"SUMMED": f"{_OURS}:summed"},
        ),
    )


PATCH = Patch(
    name="transformers-expert-parallel-gradient",
    summary="routers get their whole gradient under expert parallelism",
    harm="wrong gradient",
    bug="routers get a gradient of this rank's experts alone",
    when="DistributedConfig(enable_expert_parallel=True), and training",
    symptom="""\
A mixture of experts is trained with `DistributedConfig(enable_expert_parallel=True)`. The loss is right. The gradient
of each router has only the part of the rank's own experts, so routers of different ranks drift apart. In a tiny
Qwen3-MoE on two ranks it is off by 0.62 of its norm and more, and the gradient of layers before it by 0.02 to 0.08. No
error. With `grouped_mm`, the default, it may be NaN.""",
    cause="""\
The router's hook sets the routing weights of other ranks' experts to 0. The experts' hook sums the weights' gradient
over the ranks. In the backward pass the sum comes first. The mask then removes the other ranks' part again, and the sum
has what the ranks computed for masked weights. 5.6.0 to 5.6.2 have the same code; `from_pretrained` did not divide the
experts there in our runs.""",
    repair="""\
In the backward pass the mask comes first, and then the sum, as in 5.18.0 and later. Loss and outputs stay bit for bit
what they are. The patch adds no collective.

Tensor parallelism without expert parallelism, evaluation and generation stay bit for bit what they are. Not repaired:
your own block that computes with the routing weights before the experts take them, and compiled hooks
(`torch.compile`). 5.17.0 has a sum on both sides of the mask, which is right with `grouped_mm`, and wrong with
`experts_implementation="batched_mm"`: use `grouped_mm` there, or 5.18.0.""",
    references=(
        "https://github.com/huggingface/transformers/issues/48205",
        "https://github.com/huggingface/transformers/issues/48687",
    ),
    variants=(
        Variant(
            Guard("transformers", ">=5.6.0,<5.16.0,!=5.10.0"),
            _summed_first(
                f"{_HOOKS}:RouterParallel._prepare_output_fn", _EXPERTS[0], "all_reduce_backward", "device_mesh"
            ),
        ),
        Variant(
            Guard("transformers", ">=5.16.0,<5.17.0"),
            _summed_first(
                f"{_LAYERS}:EpRouterParallel.transform_output_post_forward",
                _EXPERTS[1],
                "_AllReduceBackward.apply",
                "tp_group",
            ),
        ),
    ),
    obsolete_when="when the oldest transformers in use is 5.17.0",
    changes_numbers="""\
Routers were trained on a gradient without the part of other ranks, each rank on another one. With the patch the
gradient norm differs. Train again.""",
    conditions=tuple(Condition(target) for target in _EXPERTS),
)
