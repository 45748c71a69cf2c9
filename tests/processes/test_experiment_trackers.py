"""examples/experiment_trackers.py, against a process in which there is no tracker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "experiment_trackers.py"


def test_it_says_what_it_wants():
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (1, "expected wandb or mlflow\n")
