"""A proof's ranks: processes of this interpreter, with limits, that leave no files or processes behind.

They get only environment variables with locations, no network access to Hugging Face and, unless requested, no GPU, and
write their caches into a temporary folder. They end with the command, however it ends (keeper.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from .lookup import LocatedProof
from .proof import Reports

RANK = Path(__file__).with_name("rank.py")
KEEPER = Path(__file__).with_name("keeper.py")
SECONDS = 300
"""Wall-clock limit: a proof takes a few seconds, mostly to load the framework from a slow disk."""
MEMORY = 6 * 2**30
"""Limit of resident bytes of a rank and its children: a framework takes one or two GiB."""
_KEPT = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"),
    *("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONNOUSERSITE", "VIRTUAL_ENV", "CONDA_PREFIX"),
    *("CC", "CXX", "CUDA_HOME", "CUDA_PATH", "CUDA_DEVICE_ORDER", "ROCM_HOME", "ROCM_PATH", "MAX_JOBS"),
)
"""Variables with locations. Others, of launchers, accelerate or torch, may change what a framework computes."""
_PREFIX = "rlhf-patches-prove-"
_RUNNING = "running"
"""The file in a folder on which its command holds a lock."""


class NotTried(Exception):
    """A proof did not finish; the message has the reason."""


def run(
    located: LocatedProof,
    *,
    seconds: float = SECONDS,
    memory: int = MEMORY,
    gpu: bool = False,
    stopped: Callable[[], bool] = lambda: False,
) -> Reports:
    """Run a proof; returns each rank's report.

    Args:
        located: the proof and its worker.
        seconds: wall-clock limit after which all ranks are killed.
        memory: limit of a rank's resident bytes above which all ranks are killed.
        gpu: whether the ranks see one shared GPU instead of none.
        stopped: whether all ranks are to be killed; asked several times a second, in this thread.

    Raises:
        NotTried: a rank failed or exceeded a limit, or it was stopped.
    """
    for _ in range(2):
        try:
            return _run(located, seconds, memory, gpu, stopped)
        except NotTried as error:
            if "EADDRINUSE" not in str(error):
                raise
    return _run(located, seconds, memory, gpu, stopped)  # twice another process took the port first


def _run(located: LocatedProof, seconds: float, memory: int, gpu: bool, stopped: Callable[[], bool]) -> Reports:
    proof = located.proof
    with _folder() as folder, _keeper(folder) as keep:
        name = str(folder)
        command = [sys.executable, str(RANK), located.worker, "--out", name, *proof.arguments]
        environment = {**_environment(folder, gpu), **dict(proof.settings), "WORLD_SIZE": str(proof.ranks)}
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(proof.ranks):
                with open(folder / f"rank{rank}.log", "wb") as log:
                    # A session each, so that a rank's children end with it.
                    ranks.append(
                        subprocess.Popen(
                            command,
                            env={**environment, "RANK": str(rank), "LOCAL_RANK": "0" if gpu else str(rank)},
                            cwd=name,
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=log,
                            start_new_session=True,
                        )
                    )
                keep(ranks[-1].pid)
            _wait(ranks, folder, seconds, memory, stopped)
        finally:
            for process in ranks:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        try:
            return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(proof.ranks)]
        except (OSError, ValueError) as error:
            raise NotTried(f"{located.worker} wrote no report: {error}") from error


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A temporary folder. Also removes folders of commands that were killed together with their keeper, as jobs are."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), open(left / _RUNNING, "rb") as running:
            if os.fstat(running.fileno()).st_uid == os.geteuid():
                fcntl.flock(running, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if another process holds it
                shutil.rmtree(left, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name,
        open(Path(name, f"{_RUNNING}.new"), "wb") as running,
    ):
        with contextlib.suppress(OSError):  # a folder without the lock file is not removed
            fcntl.flock(running, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(running.name, Path(name, _RUNNING))
        yield Path(name)


@contextlib.contextmanager
def _keeper(folder: Path) -> Iterator[Callable[[int], None]]:
    """A process that ends the ranks and removes the folder if this process is killed; yields a function to add a rank.

    It is not a signal handler: SIGKILL has none, and the other signals belong to the program.
    """
    command = [sys.executable, "-S", str(KEEPER), str(folder)]
    process = subprocess.Popen(
        command,
        env=_kept(),
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )

    def send(rank: int | str) -> None:
        with contextlib.suppress(OSError):  # the keeper was ended
            assert process.stdin is not None
            process.stdin.write(f"{rank}\n".encode())
            process.stdin.flush()

    try:
        yield send
    finally:
        send("done")
        with contextlib.suppress(OSError):
            process.communicate()


def gpu_name() -> str:
    """The name of the ranks' GPU, from torch in a child process.

    Raises:
        NotTried: torch sees no GPU; the message has torch's error.
    """
    command = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name(0))"]
    done = subprocess.run(command, env={**_kept(), **_seen(True)}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotTried((done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"])[-1])
    return done.stdout.strip()


def _seen(gpu: bool) -> dict[str, str]:
    """The variables for the ranks' GPU: the first one visible to this process, or none."""
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    if not gpu:
        return dict.fromkeys(names, "")
    return {name: os.environ[name].split(",")[0] for name in names if name in os.environ} or {names[0]: "0"}


def _kept() -> dict[str, str]:
    """The variables of this process that ranks inherit."""
    kept = {name: value for name, value in os.environ.items() if name in _KEPT or name.startswith("LC_")}
    if kept.get("PYTHONPATH"):  # entries are relative to the user's folder
        kept["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, kept["PYTHONPATH"].split(os.pathsep)))
    return kept


def _environment(folder: Path, gpu: bool) -> dict[str, str]:
    caches = ("HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "MPLCONFIGDIR")
    return {
        **_kept(),
        **{name: str(folder / name.lower()) for name in (*caches, "XDG_CACHE_HOME", "VLLM_CACHE_ROOT")},
        "TMPDIR": str(folder),
        "RLHF_PATCHES_AUTOLOAD": "0",  # if unset, a site hook may use 1
        "PYTHONDONTWRITEBYTECODE": "1",
        **_seen(gpu),
        "DS_ACCELERATOR": "cpu",
        "NVIDIA_TF32_OVERRIDE": "0",  # accelerate allows TF32 for compiled code, whatever TrainingArguments set
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }


def _free_port() -> int:
    """A port that was free a moment ago; none that the system gives to another proof's gloo meanwhile (ephemeral)."""
    drawn = random.SystemRandom()  # a proof may seed the other one
    while True:
        port = drawn.randrange(20000, 32000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def _wait(
    ranks: list[subprocess.Popen[bytes]], folder: Path, seconds: float, memory: int, stopped: Callable[[], bool]
) -> None:
    until, pause = time.monotonic() + seconds, 0.02
    while True:
        ended = [process.poll() for process in ranks]
        for rank, status in enumerate(ended):
            if status:
                raise NotTried(f"rank {rank} {_how(status)}: {_last(folder / f'rank{rank}.log')}")
        if None not in ended:
            return
        if stopped():
            raise NotTried("it was interrupted")
        if time.monotonic() > until:
            raise NotTried(f"it exceeded the limit of {seconds:g} seconds (--seconds)")
        if max(_resident({process.pid for process in ranks}).values()) > memory:
            raise NotTried(f"a rank exceeded the limit of {memory / 2**30:g} GiB (--memory)")
        time.sleep(pause)
        pause = min(pause * 1.5, 0.2)


def _how(status: int) -> str:
    return f"ended with status {status}" if status > 0 else f"was killed by {signal.Signals(-status).name}"


def _last(log: Path) -> str:
    """The last line of a rank's output: the error, if Python raised one."""
    lines = [line.rstrip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it wrote nothing"


def _resident(sessions: Iterable[int]) -> dict[int, int]:
    """Bytes of the processes of each session (Linux; elsewhere 0)."""
    total = dict.fromkeys(sessions, 0)
    for entry in _processes():
        try:
            fields = Path(entry, "stat").read_text().rpartition(")")[2].split()
            if (session := int(fields[3])) in total:
                total[session] += int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError, IndexError):
            continue
    return total


def _processes() -> Iterator[str]:
    try:
        names = os.listdir("/proc")
    except OSError:
        return
    yield from (f"/proc/{name}" for name in names if name.isdigit())
