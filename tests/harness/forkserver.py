"""Ranks forked from a process that has loaded the framework already: a scenario costs what it computes.

    with serving() as server:
        reports = server.run("tests.harness.rollout_training", ["--scenario", "reference"], out, MEGATRON)

A worker is a module with a function ``main``; on each rank it finds a launcher's variables and ``sys.argv``, and
writes ``rank0.json``, ``rank1.json`` and so on into the folder given as ``--out``. forkserver_process.py has the
processes, loading.py what they load. Patches are applied by the worker, in the fork, to modules that are loaded.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.harness import effort, side_by_side, torchrun
from tests.harness.torchrun import Reports

SERVER = Path(__file__).with_name("forkserver_process.py")


@dataclass(frozen=True)
class Level:
    """One step of what a fork server loads.

    Attributes:
        load: ``MODULE:FUNCTION``, called without arguments.
        path: folders that go first on sys.path and PYTHONPATH before that.
    """

    load: str
    path: str | None = None


Levels = tuple[Level, ...]
TORCH: Levels = (Level("tests.harness.loading:torch"),)
MEGATRON: Levels = (*TORCH, Level("tests.harness.loading:megatron"))
_BESIDE_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
PACKAGES: Levels = (*TORCH, Level(f"tests.harness.loading:packages{'_beside_deepspeed' * _BESIDE_DEEPSPEED}"))
"""What frameworks import of others, which is most of what they load."""
MEGATRON_AND_PACKAGES: Levels = (*PACKAGES, MEGATRON[-1])
"""For what imports them anyway: a patch of theirs is applied too where all are."""
MEGATRON_BRIDGE = Level("tests.harness.loading:megatron_bridge")
"""On the above: SkyRL imports it since 0.3."""
SKYRL_WORKERS = Level("tests.harness.loading:skyrl_workers")
"""On `skyrl`."""
VLLM: Levels = (*TORCH, Level("tests.harness.loading:vllm"))
TRL: Levels = (*PACKAGES, Level("tests.harness.loading:trl"))


def trl_beside(release: str) -> Levels:
    """A release of TRL with its own transformers, ``trl-1.5``, and its GRPO trainer."""
    return (
        *TORCH,
        Level("tests.harness.loading:trl", str(side_by_side.folder(release))),
        Level("tests.harness.loading:trl_grpo"),
    )


def trl_with_liger(*folders: str) -> Levels:
    """A release of TRL, in folders, with Liger's losses, on what several of them import."""
    return (
        Level("tests.harness.loading:torch_and_interpreter", str(side_by_side.folder("liger-0.8"))),
        Level("tests.harness.loading:transformers_alone"),
        Level("tests.harness.loading:trl_kto_with_liger", os.pathsep.join(folders)),
    )


def trainer(entry: str) -> Levels:
    """The trainer of a framework on megatron-core; megatron-core alone where the entry is of none.

    Each is loaded on the ones that take less, since they share most: a test of verl's waits for verl's only.

    Args:
        entry: ends with a framework's name, as the functions of framework_entries.py do.
    """
    levels = MEGATRON
    for name in ("verl", "swift", "megatron_bridge"):
        levels = (*levels, Level(f"tests.harness.loading:{name}_trainer"))
        if entry.endswith(name):
            return levels
    return MEGATRON


def skyrl(release: str, *more: str) -> Levels:
    """A release of SkyRL beside the environment's own frameworks, and folders of which it needs something else."""
    folders = [str(side_by_side.folder(f"skyrl-{name}")) for name in (release, *more)]
    bridge = () if release in ("0.1", "0.2") else (MEGATRON_BRIDGE,)
    return (*MEGATRON_AND_PACKAGES, *bridge, Level("tests.harness.loading:skyrl", os.pathsep.join(folders)))


def skyrl_trainer(release: str) -> Levels:
    """A release of SkyRL's trainer, without Megatron; 0.4 lies there without loguru, which 0.3 has."""
    folders = [str(side_by_side.folder(f"skyrl-{name}")) for name in (release, "0.3")]
    return (*PACKAGES, Level("tests.harness.loading:skyrl_trainer", os.pathsep.join(dict.fromkeys(folders))))


def skyrl_inference(release: str) -> Levels:
    """Where a release of SkyRL starts engines; 0.4 lies there without what 0.3 has."""
    folders = [str(side_by_side.folder(f"skyrl-{name}")) for name in (release, "0.3")]
    return (*PACKAGES, Level("tests.harness.loading:skyrl_inference", os.pathsep.join(dict.fromkeys(folders))))


def megatron(release: str | None) -> Levels:
    """A release of megatron-core, such as ``megatron-0.15``; None for the environment's own."""
    return (*TORCH, Level("tests.harness.loading:megatron", str(side_by_side.folder(release)))) if release else MEGATRON


def verl(release: str | None = None) -> Levels:
    """A release of verl beside the environment's own frameworks, ``0.4`` say; None for the environment's own."""
    folder = str(side_by_side.folder(f"verl-{release}")) if release else None
    return (*MEGATRON_AND_PACKAGES, Level("tests.harness.loading:verl", folder))


def verl_workers(release: str | None = None) -> Levels:
    """verl's workers of a release as in `verl`, with what they import, and its engine for FSDP."""
    imported = Level("tests.harness.loading:verl_worker", str(side_by_side.folder("verl-worker")))
    return (*verl(release), Level("tests.harness.loading:verl_critic"), imported)


def verl_sft(release: str | None = None) -> Levels:
    """verl's trainers for supervised fine-tuning and PPO, in a release as in `verl`."""
    imported = Level("tests.harness.loading:verl_sft", str(side_by_side.folder("verl-worker")))
    return (*verl(release), Level("tests.harness.loading:verl_critic"), imported)


def verl_engine(release: str | None = None) -> Levels:
    """verl's side of vLLM, without vLLM, in a release as in `verl`; or in a folder."""
    folders = [str(side_by_side.folder("verl-worker"))]
    if release:
        folders.append(release if os.sep in release else str(side_by_side.folder(f"verl-{release}")))
    return (*PACKAGES, Level("tests.harness.loading:verl_engine", os.pathsep.join(folders)))


def beside(release: str | None, load: str, *more: str) -> Levels:
    """A function of loading.py with a release's folder, such as ``swift-4.3``, or without one.

    It is loaded on `PACKAGES`, unless one of the folders has another release of what is loaded there.

    Args:
        release: the folder, or None.
        load: the function.
        more: folders of what it needs besides.
    """
    folders = [str(side_by_side.folder(name)) for name in (release, *more) if name]
    others = [name for folder in folders for name in ("accelerate", "transformers") if Path(folder, name).is_dir()]
    return (*(TORCH if others else PACKAGES), Level(f"tests.harness.loading:{load}", os.pathsep.join(folders) or None))


def verl_agent_loop(release: str | None = None) -> Levels:
    """verl's conversations with tools, in a release as in `verl_engine`."""
    return (*verl_engine(release), Level("tests.harness.loading:verl_agent_loop"))


def with_rewards(math_verify: str, verl: str) -> Levels:
    """A release of Math-Verify, then what uses it: a release of verl, ``0.7`` say, and the environment's TRL."""
    users = Level("tests.harness.loading:rewards", str(side_by_side.folder(f"verl-{verl}")))
    return (*beside(f"math-verify-{math_verify}", "math_verify"), users)


def swift(release: str | None, trainer: str) -> Levels:
    """A release of ms-swift with its own megatron-core; None for the environment's own.

    Args:
        release: the folder, such as ``swift-3.12``.
        trainer: the function of loading.py.
    """
    return beside(release, trainer)


def peft(release: str | None) -> Levels:
    """A release of PEFT, such as ``peft-0.20``, with the environment's transformers; None for the environment's own."""
    return beside(release, "peft")


def transformer_engine(release: str, below: Levels = ()) -> Levels:
    """A release of TransformerEngine, with the numpy that Triton's interpreter wants, and what is loaded before it."""
    numpy, folder = (str(side_by_side.folder(name)) for name in ("numpy-2.1", f"transformer-engine-{release}"))
    interpreted = Level("tests.harness.loading:torch_and_interpreter", numpy)
    return interpreted, *below, Level("tests.harness.loading:transformer_engine", folder)


def megatron_with_transformer_engine(release: str, *more: str) -> Levels:
    """megatron-core with the layers of a release of TransformerEngine, and folders of others such as megatron-core."""
    folders = [str(side_by_side.folder(name)) for name in (*more, f"transformer-engine-{release}")]
    load = Level("tests.harness.loading:megatron_with_transformer_engine", os.pathsep.join(folders))
    return Level("tests.harness.loading:torch_and_interpreter"), load


@dataclass(frozen=True)
class ForkServer:
    """Speaks to the fork servers of a session; ``address`` is the socket of the first."""

    address: str

    def run(
        self,
        worker: str,
        arguments: Sequence[str],
        out: Path,
        levels: Levels,
        *,
        ranks: int = 2,
        settings: Mapping[str, str] | None = None,
        timeout: float = 240,
    ) -> Reports:
        """Run a worker on forks of the process that has loaded ``levels``; returns each rank's report.

        Args:
            worker: the module.
            arguments: after ``--out FOLDER``.
            out: an empty folder for the reports, and for what the ranks write to their standard streams.
            levels: what is loaded, in this order.
            ranks: how many.
            settings: environment variables of every rank.
            timeout: seconds, after which the stacks of all ranks go into the error.

        Raises:
            RuntimeError: a rank failed, died by a signal, or did not end; with what all ranks have written.
        """
        address = self.address
        answer: dict[str, Any] = {}
        for level in levels:
            answer = ask(address, {"level": asdict(level)})
            if "refused" in answer:
                break
            address = answer["socket"]
        else:
            request = {
                "worker": worker,
                "argv": ["--out", str(out), *arguments],
                "ranks": ranks,
                "settings": dict(settings or {}),
                "out": str(out),
                "timeout": timeout,
            }
            answer = ask(address, {"run": request})
        if "refused" in answer:
            if "failed:" in answer["refused"]:
                raise RuntimeError(answer["refused"])
            warnings.warn(f"{worker} runs under torchrun: {answer['refused']}", stacklevel=2)
            path = [level.path for level in levels if level.path is not None]
            own = {"PYTHONPATH": os.pathsep.join(path)} if path else {}
            return torchrun.launch(worker, arguments, out, settings={**own, **(settings or {})}, ranks=ranks)
        effort.add_elsewhere(answer.get("cpu", 0.0))
        raise_for(worker, answer, out, timeout)
        return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def raise_for(worker: str, answer: Mapping[str, Any], out: Path, timeout: float) -> None:
    """Raise unless all ranks have ended as they should."""
    if not any(answer["ended"]):
        return
    lines = [f"{worker} failed" + (f": not done after {timeout} s" if answer["timed_out"] else "")]
    for rank, status in enumerate(answer["ended"]):
        how = f"died by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        log = (out / f"rank{rank}.log").read_text(errors="replace")
        lines.append(f"---- rank {rank} {how}; it wrote:\n{log[-8000:]}")
    raise RuntimeError("\n".join(lines))


def ask(address: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Send one request and wait for the answer."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        connection.sendall(json.dumps(request).encode() + b"\n")
        line = connection.makefile().readline()
    if not line:
        raise RuntimeError(f"the fork server at {address} ended without an answer to {request}")
    answer: dict[str, Any] = json.loads(line)
    return answer


@contextlib.contextmanager
def serving(python: str = sys.executable) -> Iterator[ForkServer]:
    """Fork servers for as long as the block lasts. Starting them costs nothing before something is loaded.

    Args:
        python: the interpreter of the environment whose frameworks they load.
    """
    with tempfile.TemporaryDirectory(prefix="forkserver-") as folder:
        address = os.path.join(folder, "s")
        with open(f"{address}.log", "w") as log:  # what frameworks say while they are loaded
            process = subprocess.Popen([python, str(SERVER), address], stdin=subprocess.PIPE, stdout=log, stderr=log)
        assert process.stdin is not None
        try:
            while not os.path.exists(address) and process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.01)
            if process.returncode is not None:
                raise RuntimeError(f"{python} {SERVER} failed:\n{Path(f'{address}.log').read_text()}")
            yield ForkServer(address)
        finally:
            process.stdin.close()
            process.wait()
