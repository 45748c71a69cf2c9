"""``trl-watch-rollouts`` in runs with dropout, of several trainers, with other ends, short contexts and forms."""

from __future__ import annotations

import pytest

from tests.harness.by_case import ByCase, exhaustive_but
from tests.harness.forkserver import trl_beside
from tests.patches.trl.watch_right_runs_cases import RIGHT, WRONG

BESIDE = trl_beside("trl-1.5")


@pytest.fixture(scope="module")
def report(run_ranks):
    worker = "tests.patches.trl.watch_right_runs_ranks"

    def run(case):
        return run_ranks(worker, case, levels=BESIDE, ranks=1, ACCELERATE_USE_CPU="true")[0][case]

    return ByCase(run)


@pytest.mark.parametrize("case", exhaustive_but(RIGHT, "GPT-2's own dropout", "LoRA", "a form"))
def test_nothing_is_said_of_a_right_run(report, case):
    """Nor is its trainer kept."""
    found = report[case]
    assert "failed" not in found
    assert found["said"][len(RIGHT[case].before) if "wrong" in case else 0 :] == []
    assert found["kept"] is False


@pytest.mark.parametrize("case", exhaustive_but(WRONG, "lost under LoRA's dropout"))
def test_it_says_once_what_is_wrong(report, case):
    run, what, first = WRONG[case]
    found = report[case]
    assert "failed" not in found
    assert len(found["said"]) == 1 + len(run.before)
    line = found["said"][-1]
    assert line.startswith(f"trl-watch-rollouts: {what}")
    assert first in line
    assert found["kept"] is False
