"""GRPO's tool loop where the result of a tool does not fit into the context."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

from .grpo_tool_turns import turned

NAME = "overflow"
CASE = Case(
    "trl",
    "trl-grpo-tool-overflow",
    "GRPO, a tool's result is too long",
    "GRPOTrainer, a tool's result that does not fit into the context: the tool's tokens trained as the model's own",
)


def rows(reports: Reports) -> Iterator[Row]:
    """Turns, compared with what the engine answers to the conversation before them."""
    yield turned(CASE, reports, NAME)


PROOF = Proof(
    (CASE,),
    rows,
    seconds=15,
    arguments=("--patches", CASE.patch, NAME),
    worker="tool_loop_ranks",
    needs=("transformers>=5",),
)
