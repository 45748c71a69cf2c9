"""`rehearse` of a driver whose trainers are Ray actors: OpenRLHF's critic and actor."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.harness import ranks

DRIVER = Path(__file__).with_name("openrlhf_driver.py")
RELEASE = Path(sys.prefix, "side-by-side", "openrlhf-0.11.2")


@pytest.mark.exhaustive
def test_each_role_has_its_table_and_the_actor_ends_the_run(installed, tmp_path):
    ports = (str(ranks.free_port()), str(ranks.free_port()))
    command = ("-m", "rlhf_patches", "rehearse", "--json", "found.json", "--", "python", str(DRIVER), *ports)
    settings = {"PYTHONPATH": str(RELEASE), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_AUTH_MODE": "disabled"}
    done = installed.run(installed.python, *command, cwd=tmp_path, **settings)
    found = json.loads((tmp_path / "found.json").read_text())
    assert done.returncode == found["status"] == 0, done.stdout + done.stderr
    assert "critic trained" in done.stdout
    assert "actor trained" not in done.stdout
    tables = {"CriticPPOTrainer, ValueLoss", "ActorPPOTrainer, PolicyLoss (ppo)"}
    assert {row["of"] for row in found["relations"]} == tables
    for name in tables:
        assert done.stdout.count(f"rlhf-patches rehearse: {name}") == 1
