"""GRPO's tool loop on two ranks with unlike numbers of tool calls."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

from .grpo_tool_turns import turned

NAME = "3 and 1"
CASE = Case(
    "trl",
    "trl-grpo-tool-lockstep",
    "GRPO, tools, 3 calls and 1",
    "GRPOTrainer, 2 ranks, vllm_mode server, 3 tool calls and 1: turns of other conversations",
)


def rows(reports: Reports) -> Iterator[Row]:
    """Turns, compared with what the engine answers to the conversation before them."""
    yield turned(CASE, reports, NAME)


PROOF = Proof(
    (CASE,),
    rows,
    ranks=2,
    seconds=15,
    arguments=("--patches", CASE.patch, NAME),
    worker="tool_loop_ranks",
    needs=("transformers>=5",),
)
