"""The patches in the workers of a real Ray cluster: tasks, actors, restarts, several drivers, and `verify`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray

import rlhf_patches.ray
from rlhf_patches import SettingsError, api
from rlhf_patches.engine import functions
from rlhf_patches.engine.engine import Engine
from rlhf_patches.ray import VerifyError, runtime_env, verify
from tests.harness import toy_slime
from tests.harness.ranks import free_port

HARNESS = Path(__file__).parents[1] / "harness"
# What a task or an actor runs is sent as it is: the workers cannot import this file.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def look() -> str:
    """Whether the worker's slime is patched."""
    import slime.backends.megatron_utils.model as model

    return "applied" if "__import__" in model.train.__code__.co_names else "untouched"


@ray.remote(num_cpus=0.1, max_retries=0)
def task() -> str:
    return look()


@ray.remote(num_cpus=0.1)
def looking_together(folder: str, number: int) -> tuple[int, str]:
    """Waits until as many others have started, so that each is in a worker of its own."""
    Path(folder, str(os.getpid())).touch()
    while len(os.listdir(folder)) < number:
        time.sleep(0.05)
    return os.getpid(), look()


@ray.remote(num_cpus=0.1)
class Worker:
    """An actor that knows nothing of rlhf_patches."""

    def look(self) -> str:
        return look()

    def pid(self) -> int:
        return os.getpid()

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def from_a_task(self) -> str:
        return ray.get(task.remote())

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@ray.remote(num_cpus=0.1)
class AsyncWorker:
    async def look(self) -> str:
        return look()


@pytest.fixture
def base(slime):
    """What a user's own runtime environment brings."""
    return {"env_vars": {"PYTHONPATH": str(slime)}}


@pytest.fixture
def fresh_engine(monkeypatch):
    """This process as a driver that has called nothing yet."""
    made = Engine()
    for module in (api, rlhf_patches.ray):
        monkeypatch.setattr(module, "engine", made)


@pytest.fixture(scope="module")
def without_hook(make_installed):
    """An environment as an editable install leaves it: the package is there, and no site hook."""
    environment = make_installed()
    (environment.site / "rlhf_patches.pth").unlink()
    (environment.site / "rlhf_patches.start").unlink()
    return environment


def test_the_engine_finds_the_methods_of_an_actors_class():
    """Behind the object that ``@ray.remote`` puts in its place."""
    located = functions.attribute(sys.modules[__name__], "Worker.pid")
    assert located.owner is not None
    assert located.raw is vars(located.owner)["pid"]
    assert located.raw(None) == os.getpid()


# -------------------------------------------------------------------------------- tasks, actors, restarts


def test_a_drivers_apply_does_not_exist_in_workers_and_its_runtime_environment_does(
    connect, base, tmp_path, fresh_engine
):
    (tmp_path / "before").mkdir()
    (tmp_path / "after").mkdir()
    rlhf_patches.apply()
    with connect(base):
        worker = Worker.remote()
        assert ray.get([worker.look.remote(), worker.from_a_task.remote()]) == ["untouched"] * 2
        found = ray.get([looking_together.remote(str(tmp_path / "before"), 2) for _ in range(2)])
        assert [state for _, state in found] == ["untouched"] * 2
        with pytest.raises(VerifyError, match="has rlhf_patches, but it is off"):
            verify([worker])

    with connect(runtime_env(base)):
        workers = [Worker.remote(), AsyncWorker.remote()]
        assert ray.get([worker.look.remote() for worker in workers]) == ["applied"] * 2
        assert ray.get(workers[0].from_a_task.remote()) == "applied"
        found = ray.get([looking_together.remote(str(tmp_path / "after"), 2) for _ in range(2)])
        assert [state for _, state in found] == ["applied"] * 2
        assert len({pid for pid, _ in found}) == 2
        states = verify(workers)
        assert len({state["pid"] for state in states.values()}) == 2
        for state in states.values():
            assert state["effects"][toy_slime.PATCH]["status"] == "applied"
            assert state["effects"][toy_slime.PATCH]["code"]


def test_runtime_environments_of_tasks_and_actors(connect, base, without_hook):
    """Ray merges env_vars one by one; what an actor does not override, the setup hook too, it has from the job."""
    with connect(runtime_env(base)):
        of_frameworks = Worker.options(runtime_env={"env_vars": {"RANK": "3", "WORLD_SIZE": "4"}}).remote()
        elsewhere = Worker.options(runtime_env={"py_executable": without_hook.python}).remote()
        assert ray.get([of_frameworks.look.remote(), elsewhere.look.remote()]) == ["applied"] * 2
        assert ray.get(of_frameworks.environment.remote("RANK")) == "3"
        assert ray.get(of_frameworks.from_a_task.remote()) == "applied"
        assert ray.get(task.options(runtime_env={"env_vars": {"X": "1"}}).remote()) == "applied"
        verify([of_frameworks, elsewhere])

        off = Worker.options(runtime_env={"env_vars": {"RLHF_PATCHES_AUTOLOAD": "0"}}).remote()
        disabled = Worker.options(runtime_env={"env_vars": {"RLHF_PATCHES_DISABLE": "slime-*"}}).remote()
        assert ray.get([off.look.remote(), off.from_a_task.remote(), disabled.look.remote()]) == ["untouched"] * 3
        with pytest.raises(VerifyError) as caught:
            verify({"rank 3": of_frameworks, "off": off, "disabled": disabled})
        message = str(caught.value)
        assert "rank 3" in message
        assert f"pid {ray.get(off.pid.remote())}" in message
        assert "off Actor(Worker, " in message
        assert "has rlhf_patches, but it is off" in message
        assert re.search(r"  disabled Actor\(Worker, .*: disabled \(disabled by RLHF_PATCHES_DISABLE\)", message)

    with connect(base):  # the other way round: a job without, and one actor with
        alone = Worker.options(runtime_env=runtime_env()).remote()
        assert ray.get([alone.look.remote(), alone.from_a_task.remote()]) == ["applied"] * 2
        assert ray.get(Worker.remote().look.remote()) == "untouched"


@pytest.mark.parametrize("how", ["SIGKILL", pytest.param("ray.kill", marks=pytest.mark.exhaustive)])
def test_an_actor_that_restarts_is_patched_again(connect, base, how):
    with connect(runtime_env(base)):
        worker = Worker.options(max_restarts=1, max_task_retries=-1).remote()
        assert ray.get(worker.look.remote()) == "applied"
        before = ray.get(worker.pid.remote())
        if how == "SIGKILL":
            os.kill(before, signal.SIGKILL)
        else:
            ray.kill(worker, no_restart=False)
        _wait_for_the_end_of(before)
        assert ray.get(worker.look.remote()) == "applied"
        (state,) = verify([worker]).values()
        assert state["pid"] == ray.get(worker.pid.remote()) != before


def test_a_second_driver_whose_cluster_has_had_another_before(connect, base, cluster, slime, tmp_path):
    """Workers belong to one job: an old driver's stay as they are, and a new driver's are patched."""
    script = tmp_path / "first.py"
    script.write_text(
        "import sys, ray\n"
        f"ray.init(address={cluster!r}, runtime_env={base!r}, log_to_driver=False, logging_level='error')\n"
        "@ray.remote(num_cpus=0.1)\n"
        "class Worker:\n"
        f"    def look(self):\n        {toy_slime.LOOK}\n        return 'applied' if '__import__' in "
        "model.train.__code__.co_names else 'untouched'\n"
        "worker = Worker.remote()\n"
        "for line in sys.stdin:\n"
        "    print(ray.get(worker.look.remote()), flush=True)\n"
    )
    first = subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    with first:
        try:

            def ask() -> str:
                first.stdin.write("look\n")
                first.stdin.flush()
                return first.stdout.readline().strip()

            assert ask() == "untouched"
            with connect(runtime_env(base)):
                worker = Worker.remote()
                assert ray.get(worker.look.remote()) == "applied"
                verify([worker])
                assert ask() == "untouched"
            with connect(base):
                assert ray.get(task.remote()) == "untouched"
        finally:
            first.stdin.close()
            first.wait(timeout=60)


# ------------------------------------------------------------------------- how it gets into the workers


def test_workers_without_a_site_hook(connect, base, without_hook):
    base["py_executable"] = without_hook.python
    full = runtime_env(base)
    with connect({**base, "env_vars": full["env_vars"]}):
        assert ray.get(task.remote()) == "untouched", "the variables alone cannot do it"
    with connect(full):
        worker = Worker.remote()
        assert ray.get([worker.look.remote(), worker.from_a_task.remote()]) == ["applied"] * 2
        off = Worker.options(runtime_env={"env_vars": {"RLHF_PATCHES_AUTOLOAD": "0"}}).remote()
        assert ray.get(off.look.remote()) == "untouched"


def test_a_framework_that_is_imported_before_ray_runs_the_hook(connect, base, without_hook, slime):
    """As another setup hook, or a sitecustomize, may do."""
    (slime / "sitecustomize.py").write_text(toy_slime.IMPORT)
    try:
        with connect(runtime_env({**base, "py_executable": without_hook.python})):
            assert ray.get(task.remote()) == "applied"
    finally:
        (slime / "sitecustomize.py").unlink()


def test_a_worker_without_the_package_does_not_go_on_unpatched(connect, base, without_hook):
    bare = {**base, "py_executable": sys.executable}
    bare["env_vars"]["PYTHONPATH"] += f"{os.pathsep}{_hiding(Path(base['env_vars']['PYTHONPATH']))}"
    with connect(runtime_env(bare)):
        with pytest.raises(ray.exceptions.WorkerCrashedError):
            ray.get(task.remote())
        worker, error = _that_died()
        assert "hidden by a test" in str(error)
        with pytest.raises(VerifyError, match="hidden by a test"):
            verify([worker])
    with connect({**bare, "env_vars": runtime_env(bare)["env_vars"]}):
        worker = Worker.remote()
        assert ray.get(worker.look.remote()) == "untouched"
        with pytest.raises(VerifyError, match="has no rlhf_patches: hidden by a test") as caught:
            verify([worker])
        assert sys.executable in str(caught.value)


def _that_died():
    """A worker, and of what it died. Another one where Ray never says so: seen once, on a machine with much to do."""
    for _ in range(3):
        worker = Worker.remote()
        with contextlib.suppress(ray.exceptions.GetTimeoutError):
            try:
                pytest.fail(f"it lives: {ray.get(worker.look.remote(), timeout=100)}")
            except ray.exceptions.ActorDiedError as error:
                return worker, error
    pytest.fail("Ray does not say what became of three workers")


def _hiding(folder: Path) -> Path:
    """A folder that makes rlhf_patches impossible to import, as where it is not installed."""
    (folder / "hiding" / "rlhf_patches").mkdir(parents=True, exist_ok=True)
    (folder / "hiding" / "rlhf_patches" / "__init__.py").write_text("raise ImportError('hidden by a test')\n")
    return folder / "hiding"


@pytest.mark.parametrize("kind", ["function", "path"])
def test_a_setup_hook_of_the_users_own_runs_after_ours(connect, base, slime, tmp_path, kind, without_hook):
    out = tmp_path / "seen"

    def hook() -> None:
        out.open("a").write(look() + "\n")

    (slime / "their_setup.py").write_text(
        f"def hook():\n    {toy_slime.IMPORT}\n    open({str(out)!r}, 'a').write("
        "('applied' if '__import__' in model.train.__code__.co_names else 'untouched') + '\\n')\n"
    )
    theirs = hook if kind == "function" else "their_setup.hook"
    chained = runtime_env({**base, "worker_process_setup_hook": theirs, "py_executable": without_hook.python})
    with connect(runtime_env(chained)):  # twice is once
        assert ray.get(task.remote()) == "applied"
    assert set(out.read_text().split()) == {"applied"}


def test_the_drivers_choice_and_settings_reach_the_workers(connect, base, monkeypatch, tmp_path, fresh_engine):
    rlhf_patches.apply(disable="slime-*")
    monkeypatch.setenv("RLHF_PATCHES_REPORT", "workers.jsonl")
    with connect(runtime_env(base)):
        worker = Worker.remote()
        assert ray.get(worker.look.remote()) == "untouched"
        (state,) = verify([worker]).values()
        assert state["effects"][toy_slime.PATCH]["reason"] == "not among RLHF_PATCHES_ONLY"
        assert ray.get(worker.environment.remote("RLHF_PATCHES_REPORT")) == str(tmp_path / "workers.jsonl")


def _driver(python: str, code: str, cwd: Path, **variables: str) -> list[str]:
    (cwd / "driver.py").write_text(code)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RLHF_PATCHES_")}
    done = subprocess.run(
        [python, "driver.py"], env={**kept, **variables}, cwd=cwd, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


# As SkyRL's: it passes env_vars of its own, and nobody can add to them.
_FRAMEWORKS_DRIVER = """
import os, ray
ray.init(address={address!r}, runtime_env={{"env_vars": {{"PYTHONPATH": {slime!r}}}}}, log_to_driver=False)
@ray.remote(num_cpus=0.1)
def look():
    {imports}
    return "applied" if "__import__" in model.train.__code__.co_names else "untouched"
print(ray.get(look.remote()))
"""


def test_a_driver_that_cannot_be_changed(cluster, slime, tmp_path, installed):
    code = _FRAMEWORKS_DRIVER.format(address=cluster, slime=str(slime), imports=toy_slime.IMPORT)
    assert _driver(installed.python, code, tmp_path) == ["untouched"]
    # Ray asks this one for every runtime environment.
    hook = {"RAY_RUNTIME_ENV_HOOK": "rlhf_patches.ray.runtime_env"}
    assert _driver(installed.python, code, tmp_path, **hook) == ["applied"]
    assert _driver(installed.python, code, tmp_path, **hook, RLHF_PATCHES_DISABLE="slime-*") == ["untouched"]


def test_the_command_for_job_submit(cluster, slime, tmp_path, installed):
    """`ray job submit` hands its JSON to the driver in this variable, and Ray merges the driver's own into it."""
    made = installed.run(installed.command, "ray-env", '{"env_vars": {"X": "1"}}')
    assert made.returncode == 0, made.stderr
    job = {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": json.loads(made.stdout), "metadata": {}})}
    code = _FRAMEWORKS_DRIVER.format(address=cluster, slime=str(slime), imports=toy_slime.IMPORT)
    assert _driver(installed.python, code, tmp_path, **job) == ["applied"]


# ------------------------------------------------------------------------------------------------ verify


def test_verify_names_the_dead_and_the_silent(connect, base):
    with connect(runtime_env(base)):
        good, dead, busy = (Worker.remote() for _ in range(3))
        pid = ray.get(dead.pid.remote())
        os.kill(pid, signal.SIGKILL)
        _wait_for_the_end_of(pid)
        ray.get([good.look.remote(), busy.pid.remote()])
        busy.sleep.remote(60)
        with pytest.raises(VerifyError) as caught:
            verify({"good": good, "dead": dead, "busy": busy}, timeout=5)
        message = str(caught.value)
        assert "dead Actor(Worker, " in message
        assert "ActorDiedError" in message
        assert "busy Actor(Worker, " in message
        assert "has not answered within 5 s" in message
        assert "good" not in message
        wrong = Worker.options(runtime_env={"env_vars": {"RLHF_PATCHES_DISABLE": "slime-no-sink-reentry"}}).remote()
        with pytest.raises(VerifyError, match=r"SettingsError: .* did you mean 'slime-no-sync-reentry'"):
            verify([wrong])


def test_verify_with_the_driver(connect, base, fresh_engine):
    with connect(runtime_env(base)):
        workers = [Worker.options(name="named").remote()]
        with pytest.raises(VerifyError, match="this process has not called apply"):
            verify(workers, driver=True)
        rlhf_patches.apply()
        verify(workers)
        with pytest.raises(VerifyError) as caught:
            verify(workers, driver=True)
        assert "this process: absent (slime is not installed)" in str(caught.value), "the worker has a slime"
        (state,) = verify(workers).values()
        assert state["actor_name"] == "named"
        assert state["node_id"] == ray.get_runtime_context().get_node_id()
        assert state["host"] == socket.gethostname()


@pytest.mark.parametrize("wrong", [[], ["not an actor"], {"a": None}, [Worker]])
def test_verify_takes_actors(wrong):
    with pytest.raises(SettingsError, match=r"no actors|expected the handle of a Ray actor"):
        verify(wrong)


# ---------------------------------------------------------------------------------------------- real TRL


@ray.remote(num_cpus=0.1)
class Trainer:
    """A rank: real TRL's chunked loss on a head that real DeepSpeed ZeRO-3 has partitioned."""

    def loss(self) -> dict[str, object]:
        import torch
        from forkserver_process import bind

        bind("tests")
        from tests.patches.trl import chunked_nll_zero3_ranks as ranks

        with ranks.zero3_configured():
            head = ranks.zero3.partition(ranks.make_head())
            hidden, labels = ranks.make_inputs("equal", torch.float32, False)
            try:
                loss, *_ = ranks.call(head.weight, None, hidden, labels, {})
                loss.backward()
            except RuntimeError as error:
                return {"error": str(error)}
        (wanted, *_), (gradient, *_) = ranks.exact(ranks.make_head().weight, None, hidden, labels, {})
        return {"loss": loss.item(), "wanted": wanted.item(), "gradient": ranks.error_of(hidden.grad, gradient)}


def _trainers(autoload: str) -> list[ray.actor.ActorHandle]:
    port = str(free_port())
    address = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [{**address, "RANK": rank, "LOCAL_RANK": rank, "RLHF_PATCHES_AUTOLOAD": autoload} for rank in "01"]
    return [Trainer.options(runtime_env={"env_vars": variables}).remote() for variables in ranks]


@pytest.mark.exhaustive
def test_real_trl_under_zero3_in_actors(connect):
    """Unpatched it crashes; patched the loss is that of a float64 computation, whose rounding is float32's."""
    with connect(runtime_env({"env_vars": {"PYTHONPATH": str(HARNESS)}})):
        unpatched = _trainers("0")
        for found in ray.get([trainer.loss.remote() for trainer in unpatched]):
            assert "must match the size of tensor b" in found["error"]
        for trainer in unpatched:
            ray.kill(trainer)
        patched = _trainers("1")
        for found in ray.get([trainer.loss.remote() for trainer in patched]):
            assert found["loss"] == pytest.approx(found["wanted"], rel=1e-6)
            assert found["gradient"] < 1e-6
        for state in verify(patched).values():
            assert state["effects"]["trl-chunked-nll-zero3"]["framework"] == "trl 1.14.2"
            assert state["effects"]["trl-chunked-nll-zero3"]["code"]


def _wait_for_the_end_of(pid: int) -> None:
    for _ in range(600):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except FileNotFoundError:
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} has not ended")
