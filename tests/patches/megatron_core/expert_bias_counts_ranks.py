"""Routers with an expert bias, and tokens that were made for their experts: ``--out FOLDER CASE...``, gloo, two ranks.

Each case before apply() of megatron-core-expert-bias-counts, after it, and after revert(); against counts in integers.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from rlhf_patches.proving import states
from tests.harness import megatron_on_cpu

torch.set_num_threads(1)
megatron_on_cpu.install()

from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter

from tests.harness import small_gpt

NAME = "megatron-core-expert-bias-counts"
EXPERTS, RATE, SMALL = 4, 1e-3, 300
EXPERT_BIAS: dict[str, Any] = {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": RATE}
# Tokens of each expert in a micro-batch of each rank, and how many micro-batches there are.
COUNTS: dict[str, tuple[list[list[int]], int]] = {
    "thousands": ([[1003, 997, 1001, 999], [1002, 998, 999, 1001]], 3),
    "many small micro-batches": ([[3, 4, 2, 3], [3, 4, 2, 3]], SMALL),
    "few": ([[5, 3, 4, 4], [4, 4, 2, 6]], 2),
}


def model_of(bf16: bool, expert_bias: bool) -> Any:
    """Of two layers, in whose routers each of the first dimensions is for an expert of its own."""
    model = small_gpt.make_model(
        bf16,
        num_moe_experts=EXPERTS,
        moe_router_topk=1,
        moe_router_score_function="sigmoid",
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_token_dispatcher_type="allgather",
        add_bias_linear=False,
        **(EXPERT_BIAS if expert_bias else {}),
    )
    for router in routers(model):
        with torch.no_grad():
            router.weight.copy_(torch.eye(EXPERTS, router.weight.shape[1]))
    return model


def routers(model: Any) -> list[TopKRouter]:
    return [one for one in model.modules() if isinstance(one, TopKRouter)]


def tokens(counts: list[int], like: torch.Tensor) -> torch.Tensor:
    """As many for each expert as ``counts`` says."""
    experts = torch.repeat_interleave(torch.arange(EXPERTS), torch.tensor(counts))
    return torch.eye(EXPERTS, like.shape[1])[experts].unsqueeze(1).to(like.dtype)


def updated(case: str, bf16: bool, *, expert_bias: bool = True, skipped: bool = False) -> dict[str, Any]:
    """How far biases have moved after a step, in rates, and how far they should have, by integers.

    Args:
        case: one of `COUNTS`.
        bf16: whether the model is.
        expert_bias: whether its routers have one.
        skipped: whether the first rank's routers get no token, so that none of them has run.
    """
    counts, micro_batches = COUNTS[case]
    model = model_of(bf16, expert_bias)
    rank = torch.distributed.get_rank()
    counted = torch.zeros(EXPERTS, dtype=torch.int64)
    probabilities = []
    for router in routers(model):
        hidden = tokens(counts[rank], router.weight)
        for _ in range(0 if skipped and rank == 0 else micro_batches):
            probability, chosen = router(hidden)
            probabilities.append(probability.double().sum().item().hex())
            if router is routers(model)[0]:
                counted += chosen.sum(0)
    if not expert_bias:
        return {"probabilities": probabilities}
    torch.distributed.all_reduce(counted)
    sys.modules[finalize_model_grads.__module__]._update_router_expert_bias([model], model.config)
    direction = torch.sign(counted.sum() - counted * EXPERTS)
    moved = [(router.expert_bias / RATE).tolist() for router in routers(model)]
    return {
        "counted": counted.tolist(),
        "wanted": [direction.tolist()] * len(moved),
        "moved": [[round(one, 6) for one in several] for several in moved],
        "directions": [[(one > 0) - (one < 0) for one in several] for several in moved],
        "counters": [str(router.local_tokens_per_expert.dtype) for router in routers(model)],
        "probabilities": probabilities,
    }


def compiled() -> str | None:
    """What the beginning of a forward with ``fullgraph=True`` ends with, of a model in float32."""
    router = routers(model_of(False, expert_bias=True))[0]

    def begun(hidden: torch.Tensor) -> torch.Tensor:
        router._maintain_float32_expert_bias()
        return hidden + router.local_tokens_per_expert.sum()

    with torch.compiler.set_stance("default"):
        try:
            torch.compile(begun, fullgraph=True, backend="eager")(torch.ones(2))
        except torch._dynamo.exc.Unsupported as error:
            return str(error)
    return None


def observed(cases: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case in cases:
        name, _, precision = case.rpartition(", ")
        found[case] = updated(name, precision == "bf16")
    found["skipped"] = updated("thousands", True, skipped=True)
    found["no expert bias"] = updated("thousands", True, expert_bias=False)
    found["compiled"] = compiled()
    return found


def main() -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="+", help="a name of COUNTS, and bf16 or fp32; the first one is also reverted")
    options = parser.parse_args()
    torch.compiler.set_stance("force_eager")  # Inductor would ask for CUDA's properties
    vars(moe_utils).setdefault("te_general_gemm", None)  # 0.16 asks for it by name without TransformerEngine
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    states.report_cases(NAME, observed, options.cases, options.out)
