"""What five runs print, as a new user starts them: one line at the start, one for a bug that occurs, one at the end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("five_runs.py")  # not imported: it applies the patches
ROOT = SCRIPT.parents[3]
PREFIX = "[rlhf_patches] "
HIT = "transformers-accumulation-scale"
FEW = ("classifier", "GRPO")
MORE = ("SFT", "DPO", "Reward")


@pytest.mark.parametrize("run", [*FEW, *(pytest.param(run, marks=pytest.mark.exhaustive) for run in MORE)])
def test_a_run_that_meets_a_bug_and_one_that_does_not_end_with_different_words(run, tmp_path):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RLHF_PATCHES_")}
    found = subprocess.run(
        [sys.executable, SCRIPT, run],
        cwd=tmp_path,
        env={**kept, "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    lines = [line for line in (found.stdout + found.stderr).splitlines() if "rlhf_patches" in line]
    assert all(line.startswith(PREFIX) for line in lines), lines
    start, *occurred, verdict = (line.removeprefix(PREFIX) for line in lines)
    assert "patches are applied (" in start
    if run == "classifier":
        (said,) = occurred
        assert said.startswith(f"{HIT}: the bug occurs in this run (gradient x 4), repaired; ")
        assert verdict.startswith("1 of ")
        assert f"repaired bugs occurred: {HIT} (gradient x 4); the other " in verdict
    else:
        assert occurred == []
        assert verdict.startswith("none of ")
        assert verdict.endswith("repaired bugs occurred")
