"""A Ray cluster loses one of its two nodes: what ran there starts again on the other one, and is patched there."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlhf_patches.ray import VerifyError, runtime_env, verify
from tests.harness.report_lines import read, status

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@ray.remote(num_cpus=0.1, max_task_retries=-1)
class Worker:
    def look(self) -> tuple[str, int, str]:
        import slime.backends.megatron_utils.model as model

        patched = "__import__" in model.train.__code__.co_names
        return "applied" if patched else "untouched", os.getpid(), ray.get_runtime_context().get_node_id()


@pytest.fixture
def second(installed, cluster):
    """Another node: the process that has started all others of it."""
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    # fmt: off
    command = [
        installed.python, "-m", "ray.scripts.scripts", "start", f"--address={cluster}", "--block", "--num-cpus=2",
        "--disable-usage-stats", "--object-store-memory=100000000",
    ]
    # fmt: on
    with Path(folder, "start.log").open("w") as log:
        process = subprocess.Popen(
            command, env=installed.environment({}), stdout=log, stderr=log, start_new_session=True, cwd=folder
        )
    yield process.pid
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    shutil.rmtree(folder, ignore_errors=True)


def nodes() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


@pytest.mark.exhaustive
def test_a_node_is_lost(connect, slime, second, tmp_path, monkeypatch):
    """Six actors, four of them on it, one of which may not start again; none is lost, and each process has its row."""
    report = tmp_path / "report.jsonl"
    monkeypatch.setenv("RLHF_PATCHES_REPORT", str(report))
    with connect(runtime_env({"env_vars": {"PYTHONPATH": str(slime)}})):
        until = time.monotonic() + 60
        while len(nodes()) < 2 and time.monotonic() < until:
            time.sleep(0.2)
        head = ray.get_runtime_context().get_node_id()
        (other,) = nodes() - {head}
        there = NodeAffinitySchedulingStrategy(other, soft=True)
        here = NodeAffinitySchedulingStrategy(head, soft=False)
        moving = [Worker.options(max_restarts=1, scheduling_strategy=there).remote() for _ in range(3)]
        staying = [Worker.options(scheduling_strategy=here).remote() for _ in range(2)]
        lost = Worker.options(max_task_retries=0, scheduling_strategy=there).remote()
        before = ray.get([worker.look.remote() for worker in (*moving, lost, *staying)])
        assert [(state, node) for state, _, node in before] == [("applied", other)] * 4 + [("applied", head)] * 2
        assert len(verify([*moving, lost, *staying])) == 6

        for process in [*psutil.Process(second).children(recursive=True), psutil.Process(second)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        while nodes() != {head} and time.monotonic() < until + 120:
            time.sleep(0.2)
        after = ray.get([worker.look.remote() for worker in (*moving, *staying)], timeout=120)
        assert [(state, node) for state, _, node in after] == [("applied", head)] * 5
        assert len(verify([*moving, *staying])) == 5
        with pytest.raises(VerifyError) as caught:
            verify({"moving": moving[0], "lost": lost}, timeout=30)
        assert "lost Actor(Worker, " in str(caught.value)
        assert "moving" not in str(caught.value)
    looked = {pid for _, pid, _ in (*before, *after)}
    rows = Counter(row["pid"] for row in read(report) if row["pid"] in looked)
    assert len(looked) == 9
    assert rows == Counter(looked)
    assert {status(row) for row in read(report) if row["pid"] in looked} == {"applied"}
