"""What ``rlhf-patches new`` writes, installed by pip and run through list, doctor and its own tests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOY = Path(__file__).parents[2] / "examples" / "plugin" / "toy_framework"
NAME = "toy-masked-mean-again"
PACKAGE = "rlhf_patches_toy_masked_mean_again"


def pip_install(site, folder):
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--no-compile", "--target", str(site)]
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", *options, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the toy framework, installed."""
    folder = tmp_path_factory.mktemp("new")
    shutil.copytree(TOY, folder / "toy", ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    pip_install(folder / "site", folder / "toy")
    return folder / "site"


@pytest.fixture
def run(site, tmp_path):
    """Runs a module of Python where the toy framework, and what is installed beside it, can be imported."""
    mine = tmp_path / "site"
    shutil.copytree(site, mine)

    def python(*arguments, cwd=tmp_path):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        environment |= {"PYTHONPATH": str(mine), "COLUMNS": "200"}
        command = [sys.executable, "-m", *arguments]
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)

    python.site = mine
    return python


def status_of(run):
    """The patch in ``doctor``."""
    done = run("rlhf_patches", "doctor", "--json")
    (row,) = [row for row in json.loads(done.stdout) if row["name"] == NAME]
    assert row["plugin"] == f"rlhf-patches-{NAME}"
    return row


def test_a_new_plugin_can_be_installed_and_is_listed(run, tmp_path):
    rewrite = ["--pattern", "$TOTAL / len($LOSSES)", "--replacement", "$TOTAL / sum(mask)"]
    done = run("rlhf_patches", "new", NAME, "--target", "toy_framework.losses:masked_mean", *rewrite)
    assert done.returncode == 0, done.stderr
    pip_install(run.site, tmp_path / NAME)
    listed = run("rlhf_patches", "list")
    (line,) = [line for line in listed.stdout.splitlines() if line.startswith(f"{NAME} ")]
    assert f"(plugin rlhf-patches-{NAME})" in line
    row = status_of(run)
    assert (row["status"], row["guard"], row["version"]) == ("applies", "==1.4", "1.4")


def test_one_that_is_not_finished_is_refused(run, tmp_path):
    done = run("rlhf_patches", "new", NAME, "--target", "toy_framework.losses:masked_mean")
    assert done.returncode == 0, done.stderr
    pip_install(run.site, tmp_path / NAME)
    row = status_of(run)
    assert row["status"] == "refused"
    assert "TODO: $PATTERN" in row["reason"]
