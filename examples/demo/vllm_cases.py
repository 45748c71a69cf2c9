"""TRL's own server on real vLLM, which it asks through its own client.

Its log-probabilities, what it answers when its worker has died, and whose completions GRPO with a tool and Online DPO
train on.
"""

from __future__ import annotations

from collections.abc import Iterator

from cases import Case, Group, Row, Runner

from tests.harness import trl_server

#: Of one log-probability: vLLM computes in float32, logits are of the order of 10.
TOLERANCE = 1e-3
RAW = Case(
    "trl",
    "trl-vllm-raw-logprobs",
    "vllm-serve at temperature 0.7",
    "`trl vllm-serve`, real vLLM 0.32.0 at temperature 0.7: a token's log-probability, compared with the policy's",
)
DEAD = Case(
    "trl",
    "trl-vllm-serve-dead-worker",
    "vllm-serve, its worker raises",
    "`trl vllm-serve` after a worker has raised: answer to the next request",
)


TURNS = Case(
    "trl",
    "trl-grpo-tool-turns",
    "GRPO with a tool, vllm-serve",
    "GRPOTrainer with a tool, `trl vllm-serve`, real vLLM 0.32.0: log-probabilities of the turns after a tool call",
)
RANKS = Case(
    "trl",
    "trl-grpo-tool-lockstep",
    "the same, two ranks",
    "the same on two ranks that call the tool for different numbers of conversations, with trl-grpo-tool-turns",
)
ONLINE = Case(
    "trl",
    "trl-online-dpo-server",
    "Online DPO, vllm-serve",
    "OnlineDPOTrainer, `trl vllm-serve`, real vLLM 0.32.0: completions that belong to their row's prompt",
)
PADDING = Case(
    "trl",
    "trl-online-dpo-server-padding",
    "the same, log-probabilities",
    "the same, with trl-online-dpo-server: the trainer's log-probability of a token, compared with vLLM's",
)


def raw(runner: Runner) -> Iterator[Row]:
    """The largest difference of a token's log-probability from that of the same weights in float64."""
    (report,) = runner.forked(
        "tests.patches.trl_on_vllm.vllm_raw_logprobs_ranks", levels=trl_server.levels("0.27.0"), ranks=1
    )
    before, after = (report[state]["temperature 0.7"] for state in ("before", "after"))
    without, with_it = f"{before:.2f} off", f"{after:.0e} off"
    words = (without, with_it, f"the same weights in float64: {after:.0e}")
    yield Row(RAW, report["version"], without, with_it, f"float64 {after:.0e}", after < 1e-3 < 0.3 < before, words)


def dead(runner: Runner) -> Iterator[Row]:
    """How the server answers a request that its worker dies of."""
    (report,) = runner.forked(
        "tests.patches.trl_on_vllm.vllm_serve_dead_worker_ranks", levels=trl_server.levels(), ranks=1
    )
    before, after = (str(report[state]["raised"]["deadly"]) for state in ("before", "after"))
    repaired = (before, after) == ("no answer", "500")
    with_it = f"status {after}"
    yield Row(DEAD, report["version"], before, with_it, "an error", repaired, (before, with_it, "an error"))


def tool(runner: Runner, case: Case, ranks: int, *options: str) -> Iterator[Row]:
    """How many of the turns after a tool call have another conversation's log-probabilities."""
    reports = runner.forked(
        "tests.patches.trl_on_vllm.tool_loop_ranks",
        *("--patch", case.patch, *options),
        levels=trl_server.levels(),
        ranks=ranks,
        ACCELERATE_USE_CPU="true",
    )
    before, after = (
        [turn for found in reports for _, *later in found[state] for turn in later] for state in ("before", "after")
    )
    other, right = sum(off > TOLERANCE for off in before), sum(off > TOLERANCE for off in after)
    words = (
        f"{other} of {len(before)} belong to another conversation, {max(before):.1f} off",
        f"{right} of {len(after)}, {max(after):.0e} off",
        f"the same weights in float64: {max(after):.0e}",
    )
    repaired = other > 0 == right and bool(after)
    yield Row(
        case,
        reports[0]["version"],
        f"{other} of {len(before)} another's",
        f"{right} of {len(after)}",
        f"float64 {max(after):.0e}",
        repaired,
        words,
    )


def online(runner: Runner) -> Iterator[Row]:
    """Completions of their row's prompt, then how far the trainer's log-probabilities are from the server's."""
    (report,) = runner.forked(
        "tests.patches.trl_on_vllm.online_dpo_server_ranks",
        levels=trl_server.levels(),
        ranks=1,
        ACCELERATE_USE_CPU="true",
    )
    before, server, after = (report[state] for state in ("before", "server", "after"))
    without, with_it = (f"{found['completions']} of {2 * 8}" for found in (before, server))
    repaired = before["completions"] == 0 < server["completions"] == server["rows"]
    words = (
        f"{without}; {before['prompts']} of 8 prompts requested",
        f"{with_it}; {server['prompts']} of 8",
        "the server's log-probabilities, in float64",
    )
    yield Row(ONLINE, report["version"], without, with_it, "float64", repaired, words)
    off, right = server["difference"], after["difference"]
    without, with_it = f"{off:.2f} off", f"{right:.0e} off"
    words = (without, with_it, f"vLLM's own: {right:.0e}")
    yield Row(PADDING, report["version"], without, with_it, "vLLM's own", right < TOLERANCE < 0.1 < off, words)


GROUPS = (
    Group((RAW,), raw),
    Group((DEAD,), dead),
    Group((TURNS,), lambda runner: tool(runner, TURNS, 1)),
    Group((RANKS,), lambda runner: tool(runner, RANKS, 2, "--beside", TURNS.patch)),
    Group((ONLINE, PADDING), online),
)
