"""``slime-watch-rollouts``: what slime's own functions log, of samples that its own `generate` made."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlhf_patches.patches.slime import _watched_rollouts
from tests.harness import slime_clone
from tests.harness.forkserver import TORCH, Level
from tests.harness.slime_clone import with_clone
from tests.patches.slime.test_partial_rollout_budget import FILES, LIMIT

RULE_COVERAGE = {
    "minimal scope": "test_nothing_is_said_of_a_right_run",
    "no side effects": "test_what_is_trained_is_the_same",
    "backward compatible": ("test_what_is_trained_is_the_same", "test_metrics_and_samples_that_are_something_else"),
    "no new blocking": "because it reads numbers that are in the host's memory",
}
WORKER = "tests.patches.slime.watch_rollouts_ranks"
MORE = ("slime/ray/rollout.py", "slime/utils/logging_utils.py", "slime/utils/metric_utils.py")


@pytest.fixture(scope="module", params=["v0.3.1"])
def report(request, run_ranks, tmp_path_factory):
    folder = slime_clone.write(tmp_path_factory.mktemp("slime"), request.param, request.param[1:], (*FILES, *MORE))
    levels = (*TORCH, Level("tests.harness.loading:torch", str(folder)))
    (found,) = run_ranks(WORKER, levels=levels, ranks=1)
    return found


@with_clone
def test_it_says_once_what_is_too_long(report):
    """With `--partial-rollout` as released, and of whom it is known."""
    (line,) = report["too long"]["said"]
    assert line.startswith("slime-watch-rollouts: a completion is 6 tokens beyond the limit at rollout 2 (limit 0). ")
    assert "Unrepaired known bugs with this sign: slime-partial-rollout-budget; " in line
    assert report["too long"]["value"] == LIMIT + 6


@with_clone
def test_it_says_once_that_the_policy_is_another(report):
    (line,) = report["other policy"]["said"]
    value = report["other policy"]["value"]
    assert line.startswith(f"slime-watch-rollouts: trainer and engine differ by {value:.3g} nats per sampled token")
    found = report["other policy"]["observed"]["log-probabilities"]
    assert (found["worst"], found["at"], found["values"]) == (pytest.approx(value), "step 5", 1)


@with_clone
@pytest.mark.parametrize("case", ["repaired", "whole", "policy"])
def test_nothing_is_said_of_a_right_run(report, case):
    assert report[case]["said"] == []
    assert list(report[case]["observed"]) == ["log-probabilities" if case == "policy" else "long-completions"]


@with_clone
@pytest.mark.parametrize("case", ["own function", "not colocated", "partial", "temperature"])
def test_what_may_differ_rightly_is_not_looked_at(report, case):
    assert (report[case]["said"], report[case]["observed"]) == ([], {})


@with_clone
def test_what_is_trained_is_the_same(report):
    assert "slime-watch-rollouts" in report["repaired"]["applied"]
    assert report["not watched"]["applied"] == ["slime-partial-rollout-budget"]
    assert report["repaired"]["value"] == report["not watched"]["value"] == LIMIT


@pytest.mark.parametrize("metrics", [None, {}, {"train/train_rollout_logprob_abs_diff": object()}])
def test_metrics_and_samples_that_are_something_else(metrics):
    for figure in _watched_rollouts.FIGURES:
        figure.start_anew()
    for settings in (None, SimpleNamespace(rollout_max_response_len=4)):
        assert _watched_rollouts.around_log(lambda *_: 1, None, (settings, metrics, "train/step"), {}) == 1
        assert _watched_rollouts.around_rollout(lambda *_: 1, None, (0, settings, metrics, {}, 1.0), {}) == 1
    assert _watched_rollouts.observed() == {}


@pytest.mark.parametrize(
    ("changed", "looked_at"),
    [({}, True), ({"colocate": False}, False), ({"keep_old_actor": True}, False), ({"rollout_top_p": 0.9}, False)],
)
def test_the_settings(changed, looked_at):
    settings = {"colocate": True, "rollout_function_path": "slime.rollout.sglang_rollout.generate_rollout"}
    settings |= {"rollout_temperature": 1.0, "rollout_top_p": 1.0, "rollout_top_k": -1, **changed}
    assert _watched_rollouts._is_the_policys(SimpleNamespace(**settings)) is looked_at
