"""TRL's GRPO on real vLLM with all patches: each rollout comes from the policy's weights of that moment."""

from __future__ import annotations

import pytest

from tests.harness import trl_server
from tests.harness.forkserver import VLLM, Level
from tests.patches.trl_on_vllm.grpo_loop_cases import CASES, STEPS

LEVELS = (*VLLM, Level("tests.harness.loading:trl_grpo"))
#: Of one token. vLLM computes in bfloat16, and log-probabilities are near 5; seen are 0.022.
TOLERANCE = 0.05
DEFAULT = "LoRA, cooler, accumulated"


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        (DEFAULT, 1),
        *(pytest.param(case, 1, marks=pytest.mark.exhaustive) for case in CASES if case != DEFAULT),
        pytest.param("plain", 2, marks=pytest.mark.exhaustive),
    ],
)
def test_rollouts_come_from_the_policy(run_ranks, case, ranks):
    worker = "tests.patches.trl_on_vllm.grpo_loop_ranks"
    levels = trl_server.levels() if "server" in case else LEVELS
    for found in run_ranks(worker, "--case", case, levels=levels, ranks=ranks):
        assert len(found["differences"]) >= STEPS
        assert max(found["differences"]) < TOLERANCE
        # Weights that were not updated would be seen.
        assert found["from_start"][-1] > 3 * TOLERANCE
        assert found["calls"][0] or "tools" not in case
        # Of a right run the watch has seen each batch, and told nothing.
        assert "trl-watch-rollouts" in found["applied"]
        assert found["watched"]["log-probabilities"]["values"] == len(found["differences"])
        assert 0 < found["watched"]["log-probabilities"]["worst"] < TOLERANCE
        assert found["watched"]["other-prompts"]["values"] >= len(found["differences"])
        assert not any("told" in figure for figure in found["watched"].values())
