"""``trl-online-dpo-watch-rollouts``: TRL's own Online DPO, as released, repaired, and right from the start."""

from __future__ import annotations

import pytest

from rlhf_patches.patches.trl.online_dpo_watch_rollouts import WATCH
from rlhf_patches.testing import PatchContract
from tests.harness.forkserver import trl_beside

RULE_COVERAGE = {
    "minimal scope": "test_nothing_is_said_of_a_right_run",
    "no side effects": "test_what_is_trained_is_the_same",
    "backward compatible": "test_what_is_trained_is_the_same",
    "no new blocking": "because it reads lists that are in the host's memory",
}


class TestContract(PatchContract):
    patch = WATCH
    releases = tuple(f"trl=={name}" for name in ("0.22.2", "0.23.0", "0.25.1", "0.26.0", "1.16.0"))
    open_range = "it looks at whatever takes the same arguments, and says nothing where it finds something else"
    held = RULE_COVERAGE


@pytest.fixture(scope="module")
def report(run_ranks):
    levels = trl_beside("trl-1.5")
    worker = "tests.patches.trl.online_dpo_watch_rollouts_ranks"
    (found,) = run_ranks(worker, levels=levels, ranks=1, ACCELERATE_USE_CPU="true")
    return found


def test_it_says_that_completions_are_single_tokens(report):
    """TRL 1.5.1, whose server's lists of tokens are taken apart."""
    (line,) = report["as released"]["said"]
    said = "completions end after one token that does not end a text: a share of 1 at step 0 (limit 0.99). "
    assert line.startswith(f"trl-online-dpo-watch-rollouts: {said}")
    assert "with this sign: trl-online-dpo-server; see `rlhf-patches explain" in line
    assert report["as released"]["error"] > 0.1


@pytest.mark.parametrize("case", ["repaired", "colocate"])
def test_nothing_is_said_of_a_right_run(report, case):
    assert report[case]["said"] == []
    assert report[case]["observed"]["short-completions"]["worst"] < 0.99
    assert report[case]["observed"]["long-completions"]["worst"] == 0


def test_what_is_trained_is_the_same(report):
    """To the bit."""
    watched, alone = report["repaired"], report["not watched"]
    assert alone["observed"] == {}
    assert watched["applied"] == ["trl-online-dpo-server", "trl-online-dpo-watch-rollouts"]
    assert (watched["gradient"], watched["logged"]) == (alone["gradient"], alone["logged"])
