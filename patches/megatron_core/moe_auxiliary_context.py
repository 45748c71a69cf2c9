"""megatron-core: auxiliary losses of a mixture of experts on context-parallel ranks."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_RANKS = "parallel_state.get_context_parallel_world_size()"
_PER_TOKEN = "MoEAuxLossAutoScaler.set_loss_scale(loss_scale)"  # since 0.12, of calculate_per_token_loss


def _scaled(function: str, ranks: str, alongside: tuple[str, ...] = (), unless: tuple[str, ...] = ()) -> Rewrite:
    return Rewrite(
        target=f"{_SCHEDULES}:{function}",
        pattern="MoEAuxLossAutoScaler.set_loss_scale(loss_scale / num_microbatches)",
        alongside=alongside,
        unless=unless,
        replacement=f"MoEAuxLossAutoScaler.set_loss_scale(loss_scale * {ranks} / num_microbatches)",
    )


PATCH = Patch(
    name="megatron-core-moe-auxiliary-context",
    summary="auxiliary losses of a mixture of experts do not shrink with context parallelism",
    harm="wrong gradient",
    bug="load balancing and z-losses are too weak by a factor of CP",
    when="a mixture of experts and context parallelism, without --calculate-per-token-loss",
    excluded_by=("context_parallel_size=1",),
    symptom="""\
With context parallelism, the load balancing losses and the z-loss of a mixture of experts are too small by a factor of
CP: with CP 4, they have a quarter of the configured coefficient. Experts become more and more unbalanced. No error is
raised. The logged losses are right.""",
    cause="""\
Gradients are averaged over data-parallel and context-parallel ranks. Each context-parallel rank has the gradient of its
own part of a sequence, so the mean of these gradients is their sum divided by CP. The language model's loss compensates
for this, and the scale of the auxiliary losses does not.""",
    repair="""\
The patch multiplies the scale of the auxiliary losses by the number of context-parallel ranks. The gradient then equals
that without context parallelism. With `--calculate-per-token-loss`, where gradients are summed, and without context
parallelism, results are bitwise identical.""",
    references=("https://github.com/NVIDIA/Megatron-LM/pull/2237",),
    variants=(
        Variant(
            Guard("megatron-core", ">=0.8.0,<=0.11.0"),
            (_scaled("forward_step", f"(1 if config.calculate_per_token_loss else {_RANKS})", unless=(_PER_TOKEN,)),),
        ),
        Variant(
            Guard("megatron-core", ">=0.12.0rc2,<=0.13.1"),
            (_scaled("forward_step", _RANKS, alongside=(_PER_TOKEN,)),),
        ),
        Variant(
            Guard("megatron-core", ">=0.14.0,<0.16.0"),
            (_scaled("forward_step_calc_loss", "cp_group_size", alongside=(_PER_TOKEN, f"cp_group_size = {_RANKS}")),),
        ),
    ),
    obsolete_when="when the oldest megatron-core in use is 0.16",
    changes_numbers="""\
Since megatron-core 0.8.0, with context parallelism, auxiliary losses of a mixture of experts had 1 / CP of the
configured weight. With the patch, they have the full weight. To keep the balance of a run that was tuned without the
patch, divide its coefficients by CP.""",
    conditions=(
        Condition(
            "megatron.core.pipeline_parallel.schedules:forward_step",
            f"{__package__}._conditions:parts_of_a_sequence",
            "auxiliary losses x",
        ),
        Condition(
            "megatron.core.pipeline_parallel.schedules:forward_step_calc_loss",
            f"{__package__}._conditions:parts_of_a_sequence",
            "auxiliary losses x",
        ),
    ),
)
