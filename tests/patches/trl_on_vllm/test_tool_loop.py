"""``trl-grpo-tool-turns`` and ``trl-grpo-tool-lockstep`` on TRL's own server and real vLLM.

The server's log-probability of a token is that of the same weights in float64, after what stands before it in its
conversation: or it was sampled in another one.
"""

from __future__ import annotations

import pytest

from tests.harness import trl_server

WORKER = "tests.patches.trl_on_vllm.tool_loop_ranks"
TURNS, RANKS = "trl-grpo-tool-turns", "trl-grpo-tool-lockstep"
#: Of one token. All is float32 in vLLM, logits are of the order of 10; seen are 8e-5.
TOLERANCE = 1e-3


@pytest.mark.parametrize(("patch", "options", "ranks"), [(TURNS, (), 1), (RANKS, ("--beside", TURNS), 2)])
def test_turns_are_sampled_in_their_own_conversations(run_ranks, patch, options, ranks):
    reports = run_ranks(
        WORKER, "--patch", patch, *options, levels=trl_server.levels(), ranks=ranks, ACCELERATE_USE_CPU="true"
    )
    assert {(found["version"], found["status"]) for found in reports} == {(trl_server.RELEASE, "applied")}
    before, after = ([turns for found in reports for turns in found[state]] for state in ("before", "after"))
    assert max(first for first, *_ in before + after) < TOLERANCE
    assert any(len(turns) > 1 for turns in after), "some call the tool"
    assert max(max(turns) for turns in before) > 1
    assert max(max(turns) for turns in after) < TOLERANCE
