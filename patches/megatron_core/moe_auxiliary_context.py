"""megatron-core: a mixture's auxiliary losses on context-parallel ranks."""

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
    summary="a mixture's auxiliary losses do not shrink with context parallelism",
    harm="wrong gradient",
    bug="load balancing and z-losses are too weak, by CP",
    when="a mixture of experts and context parallelism, without --calculate-per-token-loss",
    excluded_by=("context_parallel_size=1",),
    symptom="""\
With context parallelism a mixture's load balancing losses and its z-loss count CP times too little: with CP 4 a
quarter of the coefficient that was set. Experts are used more and more unequally. No error; the losses that are logged
are right.""",
    cause="""\
Gradients are averaged over data- and context-parallel ranks. Each of the latter has the gradient of its own part of a
sequence, so their mean is the sum over CP. The language model's loss makes up for it, and the scale of the auxiliary
losses does not.""",
    repair="""\
The scale of the auxiliary losses is multiplied by the number of context-parallel ranks. The gradient is then that
without context parallelism. With `--calculate-per-token-loss`, where gradients are added up, and without
context parallelism all is bit for bit as before.""",
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
Since megatron-core 0.8.0, with context parallelism, a mixture's auxiliary losses had 1 / CP of the weight that was set.
With the patch they have all of it. A run that was tuned with it has the balance that it had with coefficients divided
by CP.""",
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
