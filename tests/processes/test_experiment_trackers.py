"""examples/experiment_trackers.py, against objects that refuse what the real trackers refuse.

Their limits were read in mlflow 3.17.2 (mlflow/utils/validation.py) and wandb 0.31.0 (wandb/sdk/wandb_config.py), on
which the example was run too.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "experiment_trackers.py"
spec = importlib.util.spec_from_file_location("experiment_trackers", EXAMPLE)
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)


def test_it_says_what_it_wants():
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (1, "expected wandb or mlflow\n")
