"""A training step of megatron-core's GPT within DistributedDataParallel, however its ranks share it."""

from __future__ import annotations

from typing import Any

from hunt import megatron_gpt
from hunt.outcomes import Outcome
from hunt.trainers import CannotRun, trainer


@trainer("megatron_core/gpt", "megatron_core/gpt-per-token")
def gpt(
    *,
    name: str,
    micro_batch: int = 8,
    accumulation: int = 1,
    ranks: int = 1,
    order: str = "given",
    parallel: str = "",
    pipeline: str = "",
) -> Outcome:
    """A loss per micro-batch, or of all tokens that count."""
    divided = megatron_gpt.layout(parallel or pipeline, ranks)
    return step(divided, ranks, pipeline, "per-token" in name, order, micro_batch, accumulation)


DISPATCHERS = ("alltoall", "allgather")
LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss", "z_loss")


@trainer(
    *(f"megatron_core/moe-{name}" for name in (*DISPATCHERS, *LOSSES)),
    *(f"megatron_core/moe-{name}-per-token" for name in LOSSES if name != "global_aux_loss"),
)
def moe(
    *,
    name: str,
    micro_batch: int = 8,
    accumulation: int = 1,
    ranks: int = 1,
    order: str = "given",
    parallel: str = "",
    pipeline: str = "",
    experts: int = 1,
) -> Outcome:
    """The same with four experts, of which each token has two; with a loss of the router's, or none."""
    if parallel == "tensor":
        raise CannotRun("experts with tensor parallelism want sequence parallelism in training")
    loss = name.removeprefix("moe-").removesuffix("-per-token")
    settings = {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": loss if loss in DISPATCHERS else "alltoall",
        "moe_router_load_balancing_type": loss if loss in LOSSES[:3] else "none",
        "moe_aux_loss_coeff": 1.0 if loss in LOSSES[:3] else 0.0,
        "moe_z_loss_coeff": 0.1 if loss == "z_loss" else None,
        "add_bias_linear": False,
    }
    megatron_gpt.let_experts_run()
    divided = megatron_gpt.layout(parallel or pipeline, ranks, experts)
    return step(divided, ranks, pipeline, "per-token" in name, order, micro_batch, accumulation, **settings)


def step(
    divided: megatron_gpt.Layout,
    ranks: int,
    pipeline: str,
    per_token: bool,
    order: str,
    micro_batch: int,
    accumulation: int,
    **settings: Any,
) -> Outcome:
    """By megatron-core's own schedule."""
    from megatron.core.distributed import finalize_model_grads

    divided.start(ranks)
    from megatron.core.pipeline_parallel import get_forward_backward_func

    batches = megatron_gpt.rows_of_this_rank(order, micro_batch, accumulation)
    model = megatron_gpt.chunks(divided, pipeline, calculate_per_token_loss=per_token, **settings)
    for chunk in model:
        chunk.config.finalize_model_grads_func = finalize_model_grads
    data = megatron_gpt.Data(per_token)
    get_forward_backward_func()(
        forward_step_func=data.forward_step,
        data_iterator=[iter(batches) for _ in model] if len(model) > 1 else iter(batches),
        model=model,
        num_microbatches=len(batches),
        seq_length=megatron_gpt.LENGTH,
        micro_batch_size=micro_batch,
        forward_only=False,
    )
    return {"loss": {"step": data.loss(divided, len(batches))}, "gradient": megatron_gpt.gradients(model)}
