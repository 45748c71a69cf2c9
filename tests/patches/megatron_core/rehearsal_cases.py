"""Configurations of megatron-core's training that are rehearsed: right ones by number of ranks, faults, known bugs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """A configuration.

    Args:
        layout: such as ``TP 2, CP 2``; ``SP`` for sequence parallelism, ``VP 2`` for two chunks on each stage.
        micro_batches: in a window.
        model: a GPT, Gated DeltaNets, or the layers of transformer_engine_norms_ranks.py, with its layouts.
        per_token: ``calculate_per_token_loss``.
        sharded: the distributed optimizer.
        masked: some tokens have no loss.
        padded: the end of each row is padding, of which the model is told.
        returns_tokens: the loss function returns the number of tokens.
        finalize: whether the schedule finalizes gradients; else the loop does.
        ddp: of the `DistributedDataParallelConfig`.
        settings: of the model.
    """

    layout: str = ""
    micro_batches: int = 4
    model: str = "gpt"
    per_token: bool = False
    sharded: bool = False
    masked: bool = False
    padded: bool = False
    returns_tokens: bool = False
    bf16: bool = False
    clip: float = 1.0
    lr: float = 1e-2
    optimizer: str = "adam"
    finalize: bool = True
    ddp: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, int]:
        given = dict(part.split(" ") for part in self.layout.split(", ") if part.count(" ") == 1)
        return {name: int(given.get(name, 1)) for name in ("TP", "PP", "CP", "EP", "VP")}

    @property
    def sequence(self) -> bool:
        return "SP" in self.layout


_EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
}


def balanced(kind: str, **more: Any) -> dict[str, Any]:
    """A mixture of experts with an auxiliary loss of the router."""
    return {
        **_EXPERTS,
        "moe_router_load_balancing_type": f"{kind}_loss" if "aux" in kind else "none",
        "moe_aux_loss_coeff": 0.5 if "aux" in kind else 0.0,
        "moe_z_loss_coeff": 0.1 if kind == "z" else None,
        **more,
    }


_OVERLAPPED = {"overlap_grad_reduce": True, "bucket_size": 1000}
_TOKENS: dict[str, Any] = {"per_token": True, "masked": True}

ONE: dict[str, Case] = {
    "one": Case(),
    "one, one micro-batch": Case(micro_batches=1),
    "one, tokens": Case(**_TOKENS),
    "one, distributed": Case(sharded=True),
    "one, bf16": Case(bf16=True),
    "one, dropout": Case(settings={"dropout": 0.2}),
    "one, aux": Case(settings=balanced("aux")),
    "one, seq_aux": Case(settings=balanced("seq_aux")),
    "one, recomputed": Case(
        settings={"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    ),
    "one, SGD": Case(optimizer="sgd"),
}
TWO: dict[str, Case] = {
    "DP": Case(),
    "DP, tokens": Case(**_TOKENS),
    "DP, means over tokens": Case(masked=True, returns_tokens=True),
    "DP, distributed": Case(sharded=True),
    "DP, distributed, bf16": Case(sharded=True, bf16=True),
    "DP, overlapped": Case(ddp=_OVERLAPPED),
    "DP, distributed, overlapped": Case(sharded=True, ddp={**_OVERLAPPED, "overlap_param_gather": True}),
    "DP, finalized by the loop": Case(finalize=False),
    "DP, no clipping": Case(clip=0.0),
    "DP, warm-up": Case(lr=0.0),
    "DP, aux, tokens": Case(settings=balanced("aux"), per_token=True),
    "DP, aux, z": Case(micro_batches=2, settings=balanced("aux", moe_z_loss_coeff=0.1)),
    "DP, aux, masked": Case(settings=balanced("aux"), **_TOKENS),
    "TP": Case("TP 2"),
    "TP, dropout": Case("TP 2", settings={"dropout": 0.2}),
    "TP, SP": Case("TP 2, SP"),
    "TP, SP, distributed": Case("TP 2, SP", sharded=True),
    "TP, bf16": Case("TP 2", bf16=True),
    "TP, tied": Case("TP 2", settings={"tied": True}),
    "TP, SP, aux": Case("TP 2, SP", 2, settings=balanced("aux")),
    "TP, SP, z": Case("TP 2, SP", 2, settings=balanced("z")),
    "PP": Case("PP 2"),
    "PP, tied": Case("PP 2", settings={"tied": True}),
    "PP, tokens": Case("PP 2", **_TOKENS),
    "PP, one micro-batch": Case("PP 2", 1),
    "PP, chunks": Case("PP 2, VP 2"),
    "PP, chunks, distributed": Case("PP 2, VP 2", sharded=True),
    "CP": Case("CP 2"),
    "CP, tokens": Case("CP 2", **_TOKENS),
    "CP, distributed": Case("CP 2", sharded=True),
    "CP, aux": Case("CP 2", 2, settings=balanced("aux")),
    "EP": Case("EP 2", 2, settings=balanced("none")),
    "EP, seq_aux, distributed": Case("EP 2", 2, sharded=True, settings=balanced("seq_aux")),
    "EP, expert bias": Case(
        "EP 2",
        2,
        settings=balanced("none", moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid"),
    ),
}
FOUR: dict[str, Case] = {
    "TP, DP": Case("TP 2, SP"),
    "TP, PP": Case("TP 2, PP 2"),
    "TP, PP, tied": Case("TP 2, PP 2", settings={"tied": True}),
    "TP, CP": Case("TP 2, CP 2"),
    "TP, DP, aux, distributed": Case("TP 2, SP", 2, sharded=True, settings=balanced("aux")),
    "TP, EP, aux": Case("TP 2, SP, EP 2", 2, settings=balanced("aux")),
    "PP, EP": Case("PP 2, EP 2", settings=balanced("none")),
    "PP, CP, tokens": Case("PP 2, CP 2", **_TOKENS),
    "PP, chunks, DP, distributed": Case("PP 2, VP 2", sharded=True),
    "EP 4, z": Case("EP 4", 2, settings=balanced("z")),
}
FAULTS: dict[str, Case] = dict.fromkeys(
    ("clears", "unreduced", "summed", "lacks", "draws", "own data", "own norm"), Case()
)
REFUSED: dict[str, Case] = dict.fromkeys(
    ("another release", "8 bits", "another wrapper", "twice", "another optimizer"), Case()
)
KNOWN: dict[str, Case] = {
    "sinks": Case("TP 2", model="sinks"),
    "sinks, distributed": Case("TP 2", model="sinks", sharded=True),
    "duplicated": Case("TP 2", model="duplicated"),
    "duplicated, distributed": Case("TP 2", model="duplicated", sharded=True),
    "experts": Case("TP 2", model="experts"),
    "experts, EP": Case("TP 2, EP 2", model="experts"),
    "experts, EP, distributed": Case("TP 2, EP 2", model="experts", sharded=True),
    "gdn": Case("TP 2", model="gdn"),
    "per token": Case("TP 2, SP", 2, per_token=True, settings=balanced("aux")),
    "per token, seq": Case("TP 2, SP", 2, per_token=True, settings=balanced("seq_aux")),
    "per token, z": Case("TP 2, SP", 2, per_token=True, settings=balanced("z")),
    "global": Case("", 2, settings=balanced("global_aux")),
    "context": Case("CP 2", 2, settings=balanced("aux")),
    "context, z": Case("CP 2", 2, settings=balanced("z")),
    "padding": Case("TP 2, SP", 2, per_token=True, padded=True, settings=balanced("aux")),
}
LAYOUTS: dict[str, Case] = {
    "TP, gated": Case("TP 2, SP", settings={"gated_linear_unit": True, "add_bias_linear": False}),
    "TP, groups": Case("TP 2, SP", settings={"num_query_groups": 2}),
    "TP, global": Case("TP 2, SP", 2, settings=balanced("global_aux")),
    "unmarked": Case("TP 2, SP"),
    "divided": Case("TP 2"),
    "summed over ranks": Case("TP 2"),
    "summed over ranks, 3": Case("TP 2", 3),
    "validated": Case("TP 2"),
    "get_next": Case("TP 2"),
    "wider": Case("TP 2"),
}
CASES = {**LAYOUTS, **ONE, **TWO, **FOUR, **FAULTS, **REFUSED, **KNOWN}
