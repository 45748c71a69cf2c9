"""What people run with TRL and is right: nothing is logged, and a report says that it was not affected."""

from __future__ import annotations

import pytest

from tests.harness.forkserver import TRL, beside
from tests.patches.trl import no_alarms_ranks as runs

WORKER = runs.__name__
FEW = ("SFT", "SFT, chunked_nll", "SFT, LoRA", "DPO", "KTO", "Reward", "GRPO")


@pytest.mark.parametrize(
    ("release", "ranks", "cases"),
    [
        pytest.param(None, 1, FEW, id="1.14"),
        *(
            pytest.param(*each, (), id=f"{each[0] or '1.14'}, all, {each[1]} ranks", marks=pytest.mark.exhaustive)
            for each in ((None, 1), (None, 2), ("trl-1.5", 1), ("trl-1.16", 1), ("trl-1.16", 2))
        ),
    ],
)
def test_right_runs_are_silent(run_ranks, release, ranks, cases):
    levels = beside(release, "trl") if release else TRL
    reports = run_ranks(WORKER, *cases, levels=levels, ranks=ranks, ACCELERATE_USE_CPU="true")
    assert len(reports) == ranks
    for report in reports:
        assert len(report) > len(cases or runs.CASES)
        for case, found in report.items():
            if case != "version":
                assert found["said"] == [], case
                assert found["calls"] > 0, case
                assert found["held"] == 0, case
                # Before 1.15 SFT's dft is a compute_loss_func, of which nothing is known.
                assert found["asked"] == found["calls"] or (case, found["asked"]) == ("SFT, dft", 0), case
