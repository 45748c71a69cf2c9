"""Ray that is started again within a worker, on an old Ray and on the newest: a cluster of its own each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import harness

SCRIPT = Path(harness.__file__).with_name("nested_ray.py")
REFUSED = "AssertionError: The env var, __RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR, is not permitted"


def started(installed, folder, *arguments, **settings):
    done = installed.run(installed.python, str(SCRIPT), *arguments, cwd=folder, **settings)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-2:]


@pytest.mark.exhaustive
def test_before_2_55_there_is_no_setup_hook_that_it_would_fail_with(installed, tmp_path):
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--no-deps", "--target", str(tmp_path / "old")]
    subprocess.run([*pip, "ray==2.54.1"], check=True)
    settings = {"PYTHONPATH": str(tmp_path / "old")}
    patched, error = started(installed, tmp_path, "--hook", **settings)
    assert patched == "patched"
    assert error.startswith(REFUSED)
    assert started(installed, tmp_path, **settings) == ["patched", "went on"]


@pytest.mark.exhaustive
def test_the_newest_takes_it_with_the_hook(installed, tmp_path):
    assert started(installed, tmp_path) == ["patched", "went on"]
