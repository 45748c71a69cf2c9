"""``trl-vllm-sleep-weights``: TRL's own trainers on a colocated engine that sleeps, each generation against the policy.

The engine is tests/harness/sleeping_engine.py's, because vLLM's sleep mode wants CUDA; vllm_sleep_weights_ranks.py
trains on it.
"""

from __future__ import annotations

import math
import os
from types import SimpleNamespace

import pytest

from rlhf_patches.patches.trl import _engine_weights
from rlhf_patches.patches.trl.vllm_sleep_weights import PATCH
from rlhf_patches.testing import PatchContract
from tests.harness import unpacked
from tests.harness.by_case import exhaustive_but
from tests.harness.forkserver import TORCH, Level, trl_beside
from tests.harness.side_by_side import folder

RULE_COVERAGE = {
    "minimal scope": ("test_without_sleep_mode_nothing_changes", "test_what_the_trainer_has_just_loaded_is_left"),
    "no side effects": (
        "because what it knows of an engine is kept in sets of its own; upstream's methods do the loading"
    ),
    "backward compatible": ("test_without_sleep_mode_nothing_changes", "test_every_case_trains_to_its_end"),
    "no new blocking": "test_where_ranks_may_not_come_nothing_is_gathered",
    "Without sleep mode nothing changes": "test_without_sleep_mode_nothing_changes",
    "they are left as they are": "test_what_the_trainer_has_just_loaded_is_left",
    "Not repaired": "test_where_ranks_may_not_come_nothing_is_gathered",
    "as before": "test_where_ranks_may_not_come_nothing_is_gathered",
}
WORKER = "tests.patches.trl.vllm_sleep_weights_ranks"
LATER = {
    "steps": [1, 2],
    "micro-batches": [2, 3],
    "tools": [2, 3],
    "own rollouts": [2, 3],
    "evaluated": [1, 2, 3, 4, 5],
    "rollouts": [1, 2, 3],
    "RLOO": [1],
}
"""By the case, the generations after the policy's first step."""
CASES, MORE = tuple(LATER)[:4], tuple(LATER)[4:]
ROUNDING = 1e-12
"""Of sums over 99 words in float64, by the engine and by the reference; seen are 2e-15."""
BESIDE = trl_beside("trl-1.5")


class TestContract(PatchContract):
    patch = PATCH
    releases = (
        *(f"trl=={name}" for name in ("0.24.0", "0.25.0", "0.27.2", "0.28.0", "0.29.1", "1.8.0", "1.9.2", "1.10.0")),
    )
    held = RULE_COVERAGE


@pytest.fixture(scope="module")
def ran(run_ranks):
    def run(*cases):
        (found,) = run_ranks(WORKER, *cases, "awake", levels=BESIDE, ranks=1, ACCELERATE_USE_CPU="true")
        assert (found["version"], found["status"]) == ("1.5.1", "applied")
        return found

    return run


@pytest.fixture(scope="module")
def report(ran):
    return ran(*CASES)


def is_repaired(found, case):
    """Of each generation weights are the policy's to the bit, and log-probabilities its own."""
    for each in found["after"][case]["generations"]:
        assert each["weights"] == 0
        assert each["logprobs"] < ROUNDING


def wrong(found, case, state="before"):
    """Which generations came from other weights, or from none."""
    weights = [each["weights"] for each in found[state][case]["generations"]]
    return [at for at, each in enumerate(weights) if math.isnan(each) or each > 0.01]


@pytest.mark.parametrize("case", exhaustive_but(LATER, *CASES))
def test_completions_come_from_the_present_weights(ran, case):
    """As released they are the checkpoint's, which the policy is until its first step."""
    report, later = ran(*(CASES if case in CASES else MORE)), LATER[case]
    assert wrong(report, case) == later
    assert all(not report["before"][case]["generations"][at]["logprobs"] < 0.01 for at in later)
    is_repaired(report, case)


def test_what_the_trainer_logs_is_small(report):
    """The policy's own log-probabilities, in float32, against the engine's: 5e-7 is 2**-24 of logits near 5."""
    assert max(report["before"]["steps"]["differences"]) > 0.05
    assert max(report["after"]["steps"]["differences"]) < 2e-6


def test_what_the_trainer_has_just_loaded_is_left(report):
    """One load for each generation, and no reading of the checkpoint."""
    for case in CASES:
        calls = report["after"][case]["calls"]
        assert calls == ["load", "generate"] * (len(calls) // 2)


def test_every_case_trains_to_its_end(report):
    assert {found["failed"] for found in report["after"].values()} == {None}


def test_without_sleep_mode_nothing_changes(report):
    assert report["after"]["awake"] == report["before"]["awake"]
    assert wrong(report, "awake") == []


def test_reverted_it_is_trl_s_own_again(report):
    assert report["reverted"]["steps"] == report["before"]["steps"]


class Owner:
    """What the functions ask of a `VLLMGeneration`, and what they have done."""

    def __init__(self, ranks=2, plugin=None, fsdp=None):
        state = SimpleNamespace(deepspeed_plugin=plugin, fsdp_plugin=fsdp)
        self.accelerator = SimpleNamespace(num_processes=ranks, state=state)
        self.done = []
        self.llm = SimpleNamespace(collective_rpc=self.done.append)

    def sync_weights(self):
        self.done.append("load")
        _engine_weights.loaded(self, None)


SHARDED = ({"plugin": SimpleNamespace(zero_stage=3)}, {"fsdp": object()})
WHOLE = ({}, {"plugin": SimpleNamespace(zero_stage=2)}, {"ranks": 1, "plugin": SimpleNamespace(zero_stage=3)})


@pytest.mark.parametrize(
    ("settings", "then"), [(one, "reload_weights") for one in SHARDED] + [(one, "load") for one in WHOLE]
)
def test_where_ranks_may_not_come_nothing_is_gathered(settings, then):
    """In a loop of tools, and in a rollout. Outside all ranks generate, and so load, equally often."""
    owner = Owner(**settings)
    trainer = SimpleNamespace(vllm_generation=owner)
    _engine_weights.with_weights(owner)
    _engine_weights.on_its_own(trainer, _engine_weights.with_weights)(owner)
    _engine_weights.with_weights_elsewhere(trainer)
    _engine_weights.with_weights(owner)
    assert owner.done == ["load", then, then, "load"]


def test_the_whole_of_a_rollout_func_is_on_its_own(report):
    """By the path that it takes in GRPOTrainer: a rank that asks twice waits for none that asks once."""
    assert report["after"]["own rollouts"]["alone"] == [True] * 4
    assert report["before"]["own rollouts"]["alone"] == [False] * 4


def test_a_loop_that_raises_is_left():
    owner = Owner(fsdp=object())
    with pytest.raises(ZeroDivisionError):
        _engine_weights.on_its_own(SimpleNamespace(vllm_generation=owner), lambda: 1 / 0)()
    _engine_weights.with_weights(owner)
    assert owner.done == ["load"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("version", "more", "cases"),
    [
        ("0.25.1", "transformers-4.57", ("micro-batches",)),
        ("0.27.2", "transformers-4.57", ("micro-batches", "tools", "rollouts")),
        ("0.28.0", "transformers-4.57", ("steps", "tools", "rollouts", "RLOO")),
        ("1.8.0", "", ("steps", "tools", "rollouts", "RLOO")),
        ("1.9.2", "", ("steps", "tools", "RLOO")),
    ],
)
def test_other_releases(run_ranks, version, more, cases):
    """As far as they were read. Dropped weights of 0.25 are NaN here; what follows the first of them is lost."""
    folders = [unpacked.folders(f"trl=={version}"), *([str(folder(more))] if more else [])]
    level = Level("tests.harness.loading:transformers_alone", os.pathsep.join(folders))
    chosen = (*cases, "awake")
    (found,) = run_ranks(WORKER, *chosen, levels=(*TORCH, level), ranks=1, ACCELERATE_USE_CPU="true")
    assert (found["version"], found["status"]) == (version, "applied")
    for case in cases:
        assert wrong(found, case), case
        assert found["after"][case]["failed"] is None
        is_repaired(found, case)
    assert found["after"]["awake"] == found["before"]["awake"]
