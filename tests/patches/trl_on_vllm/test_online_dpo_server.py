"""``trl-online-dpo-server`` and ``-server-padding`` on TRL's own server and real vLLM."""

from __future__ import annotations

import pytest

from tests.harness import trl_server

#: Of one token: trainer and vLLM compute in float32, logits are of the order of 10.
TOLERANCE = 1e-3
PROMPTS = 8


@pytest.fixture
def found(run_ranks):
    worker = "tests.patches.trl_on_vllm.online_dpo_server_ranks"
    (found,) = run_ranks(worker, levels=trl_server.levels(), ranks=1, ACCELERATE_USE_CPU="true")
    assert found["version"] == trl_server.RELEASE
    assert set(found["status"].values()) == {"applied"}
    return found


def test_each_row_has_a_completion_of_its_prompt(found):
    before, after = found["before"], found["after"]
    assert (before["prompts"], after["prompts"]) == (PROMPTS / 2, PROMPTS)
    assert before["completions"] == 0
    assert after["completions"] == after["rows"] == 2 * PROMPTS


def test_the_trainer_s_log_probabilities_are_the_server_s(found):
    assert found["server"]["completions"] == 2 * PROMPTS
    assert found["server"]["difference"] > 0.1
    assert found["after"]["difference"] < TOLERANCE
