"""GRPO's tool loop on a server: each conversation has to be continued with its own turn."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "trl",
    "trl-grpo-tool-turns",
    "GRPO, tools, vllm_mode server",
    "GRPOTrainer, 8 conversations, 5 call a tool, vllm_mode server: turns of other conversations",
)


def turned(case: Case, reports: Reports, name: str) -> Row:
    """How many turns are not what the engine answers to the conversation before them, on all ranks."""
    of_all = {
        state: [kind for report in reports for turns in report[state][name]["turns"] for kind in turns]
        for state in ("before", "after")
    }
    before, after = (of_all[state].count("wrong") for state in ("before", "after"))
    without, with_it = (f"{wrong} of {len(of_all['after'])} turns wrong" for wrong in (before, after))
    right = set(of_all["after"]) == {"own"}
    return Row(case, reports[0]["version"], without, with_it, "the engine", before > 0 and right)


def rows(reports: Reports) -> Iterator[Row]:
    """Turns, compared with what the engine answers to the conversation before them."""
    yield turned(CASE, reports, "server")


PROOF = Proof(
    (CASE,),
    rows,
    seconds=15,
    arguments=("--patches", CASE.patch, "server"),
    worker="tool_loop_ranks",
    needs=("transformers>=5",),
)
