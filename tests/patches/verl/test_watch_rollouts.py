"""``verl-watch-rollouts``: verl's own trainers, on an engine that has lost LoRA, and on right ones."""

from __future__ import annotations

import os
import re
import sys
from types import SimpleNamespace

import pytest

from rlhf_patches.patches.verl import _watched_rollouts
from rlhf_patches.patches.verl.watch_rollouts import WATCH
from rlhf_patches.testing import PatchContract
from tests.harness import forkserver, side_by_side
from tests.harness.by_case import ByCase, exhaustive_but
from tests.harness.forkserver import Level
from tests.patches.verl.watch_rollouts_cases import OLDER

RULE_COVERAGE = {
    "minimal scope": "test_nothing_is_said_of_a_right_run",
    "no side effects": "test_what_is_trained_is_the_same",
    "backward compatible": ("test_what_is_trained_is_the_same", "test_metrics_that_are_something_else"),
    "no new blocking": "because it reads numbers that are in the host's memory, and asks a tensor nothing",
}
WORKER = "tests.patches.verl.watch_rollouts_ranks"
DRIVER = Level("tests.harness.loading:verl_driver")
LOG_PROBABILITIES = "log-probabilities"


class TestContract(PatchContract):
    patch = WATCH
    releases = (*(f"verl=={name}" for name in ("0.6.0", "0.7.1", "0.8.0", "0.9.1")),)
    open_range = "it looks at whatever takes the same arguments, and says nothing where it finds something else"
    held = RULE_COVERAGE


CORE = ("lost adapter", "no correction", "repaired", "not watched", "whole adapter")
REST = tuple(case for case in OLDER if case not in CORE)


def report_of(run_ranks, release, *cases):
    levels = (*forkserver.verl_engine(release), DRIVER)
    (found,) = run_ranks(WORKER, *cases, levels=levels, ranks=1, TORCHDYNAMO_DISABLE="1")
    return found


@pytest.fixture(scope="module")
def older(run_ranks):
    return ByCase(lambda case: report_of(run_ranks, "0.8", *(CORE if case in CORE else REST))[case])


def some(*cases):
    return exhaustive_but(cases, *(case for case in cases if case in CORE))


@pytest.fixture(scope="module")
def newer(run_ranks):
    return report_of(run_ranks, None)


@pytest.mark.parametrize("case", some("lost adapter", "no correction", "lost buckets"))
def test_it_says_once_what_is_wrong(older, case):
    """With FSDP2's merged LoRA as released, with what is computed for the correction, and without; with two buckets."""
    (line,) = older[case]["said"]
    assert re.match(
        r"verl-watch-rollouts: trainer and engine differ by [0-9.]+ nats per sampled token at step 1 \(limit 0.1\)",
        line,
    ), line
    assert "Unrepaired known bugs with this sign: verl-merged-lora, verl-lora-buckets; " in line
    assert older[case]["observed"][LOG_PROBABILITIES]["warning"].endswith("(limit 0.1)")


@pytest.mark.parametrize("case", some("lost adapter", "no correction", "repaired", "lost buckets"))
def test_it_says_no_more_than_there_is(older, case):
    """The mean |trainer - engine| of the two models, in float64, is the most that may be said."""
    figure = older[case]["observed"][LOG_PROBABILITIES]
    assert 0 < figure["worst"] <= max(older[case]["exact"]) * (1 + 1e-5)  # computed in float32
    assert figure["values"] == len(older[case]["exact"])


def test_what_is_said_is_the_trainers_own(older):
    assert older["lost adapter"]["observed"] != older["no correction"]["observed"]
    assert older["whole adapter"]["observed"][LOG_PROBABILITIES]["worst"] == max(older["whole adapter"]["exact"]) == 0


@pytest.mark.parametrize(
    "case", some("repaired", "whole adapter", "not watched", "no log-probabilities", "temperature")
)
def test_nothing_is_said_of_a_right_run(older, case):
    """Nor where nothing was computed, or an engine's log-probabilities may be of another distribution."""
    assert older[case]["said"] == []
    assert (LOG_PROBABILITIES in older[case]["observed"]) == (case in ("repaired", "whole adapter"))


def test_the_newest_trainers(newer):
    """The synchronous one is looked at, and the one whose rollouts may be older is not."""
    wrong, right = newer["sync, lost adapter"], newer["sync, right"]
    assert "trainer and engine differ by" in wrong["said"][0]
    assert len(wrong["said"]) == 1
    assert right["said"] == []
    assert right["observed"][LOG_PROBABILITIES] == {"worst": 0.0, "at": "step 1", "values": 2}
    other = newer["colocated, lost adapter"]
    assert (other["said"], other["observed"]) == ([], {})
    assert other["metrics"][0] == wrong["metrics"][0], "it has the figure"


def test_what_is_trained_is_the_same(older):
    """To the bit."""
    watched, alone = older["repaired"], older["not watched"]
    assert watched["applied"] == ["verl-merged-lora", WATCH.name]
    assert alone["applied"] == ["verl-merged-lora"]
    assert watched["metrics"] == alone["metrics"]
    assert watched["exact"] == alone["exact"]


class Wanted:
    """A tensor on a GPU: whoever makes a number of it, or compares it, waits."""

    def _waits(self, *_: object) -> bool:
        raise AssertionError("this waits for a GPU")

    __float__ = __bool__ = __eq__ = __lt__ = __gt__ = __abs__ = __index__ = _waits  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    "data",
    [
        *({}, None, {"val/reward": 1.0}, {"training/rollout_probs_diff_mean": "much"}),
        {"training/rollout_probs_diff_mean": Wanted()},
        {"training/rollout_probs_diff_mean": 1.0, "training/rollout_probs_diff_valid": Wanted()},
        {"training/rollout_probs_diff_mean": float("nan"), "training/rollout_probs_diff_valid": 0},
    ],
)
def test_metrics_that_are_something_else(data, caplog):
    (figure,) = _watched_rollouts.FIGURES
    figure.start_anew()
    trainer = SimpleNamespace(config=None)

    def log():
        return _watched_rollouts.around_log(lambda *_: "logged", None, (data, 1, None), {})

    assert _watched_rollouts.around_fit(lambda: log(), trainer, (), {}) == log() == "logged"
    assert figure.observed() == {}
    assert not [line for line in caplog.messages if "waits" in line]


@pytest.mark.parametrize("release", exhaustive_but(["0.6", "0.7", "0.8", None], None))
def test_the_settings_of_each_release(release):
    """Its own defaults are looked at; rollouts of another run, and a part of the distribution, are not."""
    omegaconf = pytest.importorskip("omegaconf")
    folder = side_by_side.folder(f"verl-{release}") if release else None
    name = "verl/trainer/config/_generated_ppo_trainer.yaml"
    path = next(path for each in ([folder] if folder else sys.path) if os.path.exists(path := f"{each}/{name}"))
    config = omegaconf.OmegaConf.load(path)
    omegaconf.OmegaConf.set_struct(config, True)
    mode = {} if release else {"trainer_mode": "sync"}

    def looked_at(**changed):
        changed_too = config.copy()
        for name, value in changed.items():
            omegaconf.OmegaConf.update(changed_too, name, value)
        return _watched_rollouts._is_the_policys(SimpleNamespace(config=changed_too, **mode))

    rollout = "actor_rollout_ref.rollout"
    skip = {"0.8": f"{rollout}.skip.enable", None: "skip.rollout.enable"}.get(release, f"{rollout}.skip_rollout")
    assert looked_at()
    assert not looked_at(**{skip: True})
    assert not looked_at(**{f"{rollout}.top_p": 0.9})
    assert not looked_at(**{f"{rollout}.do_sample": False})
    if not release:
        assert not looked_at(**{"trainer.v1.sampler.custom_sampler.path": "mine.py"})
