"""``trl-watch-rollouts``: TRL's own GRPO, on engines of which something is wrong, and on right ones.

On real vLLM with all patches it is silent: tests/patches/trl_on_vllm/test_grpo_loop.py, benchmarks/watch_alarms.py.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_patches.patches.trl import _watched_rollouts
from rlhf_patches.patches.trl.watch_rollouts import WATCH
from rlhf_patches.testing import PatchContract
from tests.harness.forkserver import TORCH, Level, trl_beside
from tests.harness.side_by_side import folder
from tests.patches.trl.watch_rollouts_cases import CASES

RULE_COVERAGE = {
    "minimal scope": ("test_nothing_is_said_of_a_right_run", "test_samples_of_a_method_of_one_s_own_are_its_own"),
    "no side effects": "test_what_is_trained_is_the_same",
    "backward compatible": "test_what_is_trained_is_the_same",
    "no new blocking": "because it reads numbers and lists that are in the host's memory",
}
BESIDE = trl_beside("trl-1.5")
WRONG = {
    "lost weights": "trainer and engine differ by {} nats per sampled token at step 2 (limit 0.1)",
    "one seed": "all completions of a group are equal; the chance of this is e^-{} at step 0 (limit 30)",
    "flat": "completions end after one token that does not end a text: a share of 1 at step 0 (limit 0.99)",
    "too long": "a completion is 4 tokens beyond the limit at step 0 (limit 0)",
}
RIGHT = [case for case in CASES if case not in WRONG]


class TestContract(PatchContract):
    patch = WATCH
    releases = (*(f"trl=={name}" for name in ("0.25.1", "0.29.1", "1.5.1", "1.10.0")), "trl==0.24.0")
    open_range = "it looks at whatever takes the same arguments, and says nothing where it finds something else"
    held = RULE_COVERAGE


@pytest.fixture(scope="module")
def report(run_ranks):
    worker = "tests.patches.trl.watch_rollouts_ranks"
    (found,) = run_ranks(worker, levels=BESIDE, ranks=1, ACCELERATE_USE_CPU="true")
    return found


@pytest.mark.parametrize("case", WRONG)
def test_it_says_once_what_is_wrong(report, case):
    (line,) = report[case]["said"]
    wanted = re.escape(f"trl-watch-rollouts: {WRONG[case]}").replace(r"\{\}", "[0-9.]+")
    assert re.match(wanted, line), line
    assert "`rlhf-patches explain trl-watch-rollouts`" in line


def test_it_names_what_is_not_repaired(report):
    """Only what is not in force; of the others nothing is to be done."""
    (line,) = report["lost weights"]["said"]
    assert "Unrepaired known bugs with this sign: trl-vllm-sleep-weights, " in line


@pytest.mark.parametrize("case", RIGHT)
def test_nothing_is_said_of_a_right_run(report, case):
    assert report[case]["said"] == []
    assert report[case]["failed"] is None


def test_the_report_has_the_worst(report):
    """Of as many batches of rollouts as there were, in training alone."""
    found = report["lost weights"]["observed"]["log-probabilities"]
    worst = max(report["lost weights"]["differences"])
    assert found["worst"] == pytest.approx(worst)
    assert (found["at"], found["values"]) == ("step 2", 3)
    assert found["warning"].startswith("trainer and engine differ by")
    assert report["repaired"]["observed"]["log-probabilities"]["worst"] < 1e-6
    assert report["logged later"]["observed"]["log-probabilities"]["values"] == 3
    assert report["evaluated"]["observed"]["long-completions"] == {"worst": 0.0, "at": "step 0", "values": 2}
    assert report["not watched"]["observed"] == {}


def test_what_is_trained_is_the_same(report):
    """To the bit."""
    watched, alone = report["repaired"], report["not watched"]
    assert "trl-watch-rollouts" in watched["applied"]
    assert "trl-watch-rollouts" not in alone["applied"]
    assert watched["trained"] == alone["trained"]
    assert watched["differences"] == alone["differences"]


class Trainer:
    """What is asked of one."""

    def __init__(self, **own: Any) -> None:
        ends = SimpleNamespace(eos_token_id=1, pad_token_id=0)
        vars(self).update(use_vllm=True, rollout_func=None, max_completion_length=4, processing_class=ends, **own)
        self.model = SimpleNamespace(training=True, generation_config=ends, config=ends)
        self.args, self.state = SimpleNamespace(generation_kwargs=None), SimpleNamespace(global_step=0)


@pytest.mark.parametrize("name", [None, "_generate", "_generate_single_turn"])
def test_samples_of_a_method_of_one_s_own_are_its_own(name, caplog):
    """As those of a `rollout_func`: to a conversation with an environment the limit may be that of a turn."""
    trainer = Trainer(**({} if name is None else {name: lambda: None}))
    try:
        _watched_rollouts.around_generate(lambda: ([[3]], [[5] * 9]), trainer, (), {})
    finally:
        for figure in _watched_rollouts.FIGURES:
            figure.start_anew()
    said = ["a completion is 5 tokens beyond the limit" in record.message for record in caplog.records]
    assert said == ([True] if name is None else [])


@pytest.fixture(scope="module")
def prompts(run_ranks):
    level = Level("tests.harness.loading:trl", str(folder("trl-1.5")))
    worker = "tests.patches.trl.watch_prompts_ranks"
    (found,) = run_ranks(worker, levels=(*TORCH, level), ranks=1, ACCELERATE_USE_CPU="true")
    return found


def test_it_says_that_a_turn_is_for_another_conversation(prompts):
    """With `trl-grpo-tool-turns` as released."""
    found = prompts["other turns"]
    (line,) = found["said"]
    assert line.startswith(
        "trl-watch-rollouts: the engine did not receive the row's own prompt in 2 rows of a batch "
        "(limit 0). Unrepaired known bugs with this sign: trl-grpo-tool-turns, trl-grpo-tool-lockstep"
    ), line
    assert any("wrong" in row for row in found["turns"])


def test_each_turn_for_its_own_conversation_is_right(prompts):
    for case, batches in (("repaired", 3), ("no call", 1)):
        assert prompts[case]["said"] == []
        assert prompts[case]["observed"]["other-prompts"] == {"worst": 0.0, "at": "", "values": batches}
    assert prompts["repaired"]["turns"] == prompts["not watched"]["turns"]
