"""Many processes at once, and disks that fail: ``python benchmarks/load.py``, or ``load.py imports --count 1000``.

Every process states what it found, and all are counted: ``lost`` is one that ran unpatched, or ended in another way
than it should; ``hung`` one that was still there after a minute or more. Both must be 0.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.harness import no_locks, ranks, toy_slime
from tests.harness.installed import Installed, build_wheel

ON = {"RLHF_PATCHES_AUTOLOAD": "1"}
LIMIT = 120  # seconds


class Ended(NamedTuple):
    """A process that has ended; ``status`` is None if it had to be killed."""

    status: int | None
    said: str
    errors: str


def wait(process: subprocess.Popen[str], limit: float = LIMIT) -> Ended:
    try:
        said, errors = process.communicate(timeout=limit)
        return Ended(process.returncode, said, errors)
    except subprocess.TimeoutExpired:
        process.kill()
        return Ended(None, *process.communicate())


class World(NamedTuple):
    """An environment with the wheel, and a checkout of the make-believe slime beside which processes start."""

    installed: Installed
    slime: Path

    def start(self, code: str, *arguments: str, before: Sequence[str] = (), **settings: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*before, self.installed.python, "-c", code, *arguments],
            env=self.installed.environment({"OMP_NUM_THREADS": "1", **settings}),
            cwd=self.slime,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


class Counted(NamedTuple):
    """One line of the table."""

    what: str
    processes: int
    right: int
    hung: int
    notes: str = ""


def count(what: str, ended: Sequence[Ended], is_right: Callable[[Ended], bool], notes: str = "") -> Counted:
    for each in ended:
        if not is_right(each):
            print(f"  wrong, {what}: {each.status} {each.said!r} {each.errors[-2000:]!r}", file=sys.stderr)
    return Counted(what, len(ended), sum(map(is_right, ended)), sum(each.status is None for each in ended), notes)


# ------------------------------------------------------------------------------------------ first imports

BESIDE = f"""
import os, random, signal, sys, threading, time, warnings
warnings.simplefilter("ignore")  # of forks with threads
kind, chance = sys.argv[1], random.Random(int(sys.argv[2]))
sys.setswitchinterval(1e-6)
class Preempted(Exception): pass
def look():
    {toy_slime.IMPORT}
    os.write(1, b"applied\\n" if "__import__" in model.train.__code__.co_names else b"untouched\\n")
def begin(function, *arguments):
    thread = threading.Thread(target=function, args=arguments); thread.start(); return thread
def handler(number, frame):
    if kind == "exits": sys.exit(3)
    if kind == "raises": raise Preempted
signal.signal(signal.SIGALRM, handler)
if kind == "threads":
    names = ["asyncio", "logging", "typing", "json", "importlib.metadata", "packaging.version", "unittest.mock"]
    chance.shuffle(names)
    threads = [begin(look), *(begin(__import__, name) for name in names), begin(look)]
    look()
elif kind == "forks":
    threads = [begin(look)]
    time.sleep(chance.random() * 0.15)
    child = os.fork()
    if not child: look(); os._exit(0)
    look()
    assert os.waitpid(child, 0)[1] == 0
elif kind == "returns":  # every millisecond, with threads and a fork
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    threads = [begin(look)]
    time.sleep(chance.random() * 0.1)
    child = os.fork()
    if not child: look(); os._exit(0)
    look()
    assert os.waitpid(child, 0)[1] == 0
    signal.setitimer(signal.ITIMER_REAL, 0)
else:
    threads = []
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.001 + chance.random() * 0.15)
        {toy_slime.IMPORT}
        time.sleep(1)
    except Preempted:
        pass
    look()
for thread in threads: thread.join()
"""
EXPECTED = {"threads": 3, "forks": 3, "returns": 3, "raises": 1, "exits": 0}


def imports(world: World, number: int) -> Iterator[Counted]:
    """First imports of a framework, beside threads, forks and signals, each in a process of its own."""

    def run(job: tuple[str, int]) -> Ended:
        return wait(world.start(BESIDE, job[0], str(job[1]), **ON))

    for kind, looks in EXPECTED.items():
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            ended = [*pool.map(run, [(kind, seed) for seed in range(number // len(EXPECTED))])]
        # Python itself ignores what a handler raises within a weak reference's callback, and the run goes on.
        ignored = [each for each in ended if kind == "exits" and each.errors.startswith("Exception ignored ")]
        wanted = (3 if kind == "exits" else 0, "applied\n" * looks)

        def is_right(each: Ended, ignored: list[Ended] = ignored, wanted: tuple[int, str] = wanted) -> bool:
            return each[:2] == ((0, "applied\n") if each in ignored else wanted)

        found = sum(each.said.count("applied") for each in ended)
        notes = f"{found} looks" + (f", {len(ignored)} signals that Python ignored" if ignored else "")
        yield count(f"first import, {kind}", ended, is_right, notes)


# ------------------------------------------------------------------------------------------ ranks at once

RANK = f"""
import sys
sys.stdin.readline()
{toy_slime.LOOK}
if sys.argv[1] == "verify":
    import torch, torch.distributed as dist
    try:
        dist.init_process_group("gloo")
        one = torch.ones(1); dist.all_reduce(one); print(int(one)); dist.destroy_process_group()
    except Exception as error:
        print(type(error).__name__, error)
"""


def together(world: World, number: int, out: Path) -> Iterator[Counted]:
    """Ranks that all start at once; a fourth of them with torch, which takes 0.15 GB each, and a process group."""
    yield _together(world, number, out, "start")
    yield _together(world, max(2, number // 4), out, "verify")
    yield _together(world, max(2, number // 4), out, "verify", differs=True)


def _together(world: World, number: int, out: Path, what: str, differs: bool = False) -> Counted:
    """If one rank has other patches, all have to be told."""
    report = out / f"{what}-{differs}.jsonl"
    settings = {"RLHF_PATCHES_STRICT": "1", "RLHF_PATCHES_VERIFY": "1", "RLHF_PATCHES_REPORT": str(report)}
    other = number // 2
    with ranks.store_of_a_launcher() as port:
        launched = {
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"},
            **{"WORLD_SIZE": str(number), "OMP_NUM_THREADS": "1"},
        }
        read, write = os.pipe()  # all wait for it: they are there before the first goes on
        started = []
        for rank in range(number):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            if differs and rank == other:
                own["RLHF_PATCHES_DISABLE"] = toy_slime.PATCH
            started.append(
                subprocess.Popen(
                    [world.installed.python, "-c", RANK, what],
                    env=world.installed.environment({**ON, **settings, **launched, **own}),
                    cwd=world.slime,
                    stdin=read,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        os.close(read)
        os.close(write)
        ended = [wait(process, 500) for process in started]
    rows = lines(report)
    complete = sorted(row["pid"] for row in rows) == sorted(process.pid for process in started)  # type: ignore[type-var]
    expected = "applied\n" if what == "start" else f"applied\n{number}\n"

    def is_right(each: Ended) -> bool:
        told = "VerifyError" in each.said and f"rank {other} on" in each.said
        return complete and each.status == 0 and (told if differs else each.said == expected)

    named = {"start": "processes at once", "verify": "ranks at once"}[what] + (", one differs" if differs else "")
    return count(named, ended, is_right, f"{len(rows)} rows, {sum(row['ended'] == 'exit' for row in rows)} ended")


def lines(report: Path) -> list[dict[str, object]]:
    """The report's rows; a damaged one raises."""
    return [json.loads(line) for line in report.read_text().splitlines() if line.strip()] if report.exists() else []


# ------------------------------------------------------------------------------------------ disks

TRAINS = f"import rlhf_patches; rlhf_patches.apply(); {toy_slime.LOOK}; rlhf_patches.revert(); rlhf_patches.apply()"


def disks(world: World, number: int, out: Path) -> Iterator[Counted]:
    """Processes at once whose report is on a disk that is full, read-only, or has no locks."""
    plain = out / "plain.jsonl"
    yield _on(world, number, "plain disk", plain, {}, rows=True)
    for way in no_locks.WAYS:
        shim = no_locks.preload(out, way)
        yield _on(world, number, f"locks fail: {way}", out / f"{way}.jsonl", shim, rows=True)
    for name, prepared in (
        ("full disk", "head -c 16384 /dev/zero > {disk}/filler"),
        ("read-only disk", "mount -o remount,ro {disk}"),
    ):
        disk = out / name.replace(" ", "-")
        disk.mkdir()
        mounted = f'mount -t tmpfs -o size=16k tmpfs {disk} && {prepared.format(disk=disk)} && exec "$@"'
        before = ("unshare", "-m", "sh", "-c", mounted, "sh")
        yield _on(world, number, name, disk / "report.jsonl", {}, before, rows=False)


def _on(
    world: World,
    number: int,
    what: str,
    report: Path,
    settings: Mapping[str, str],
    before: Sequence[str] = (),
    *,
    rows: bool,
) -> Counted:
    """Ranks, so that one of them speaks: one line if nothing can be written, else a row of each."""
    started = [
        world.start(TRAINS, before=before, RLHF_PATCHES_REPORT=str(report), RANK=str(rank), **settings)
        for rank in range(number)
    ]
    ended = [wait(process) for process in started]
    said = [each.errors.splitlines() for each in ended]
    if rows:
        found = lines(report)
        everything = collections.Counter(row["pid"] for row in found) == collections.Counter(p.pid for p in started)
        quiet = not any(said)
        return count(
            what, ended, lambda each: each[:2] == (0, "applied\n") and everything and quiet, f"{len(found)} rows"
        )
    once = len(said[0]) == 1 and "cannot write the report" in said[0][0] and not any(said[1:])
    return count(what, ended, lambda each: each[:2] == (0, "applied\n") and once, f"said once: {once}")


# ------------------------------------------------------------------------------------------ data loaders

LOADER = f"""
import os, sys, threading, torch
class Data(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, index):
        {toy_slime.IMPORT}
        return os.getpid(), "__import__" in model.train.__code__.co_names
def main(method, first):
    import rlhf_patches
    if first == "before": rlhf_patches.apply(children=True)
    loader = torch.utils.data.DataLoader(Data(), batch_size=1, num_workers=4, multiprocessing_context=method)
    items = iter(loader)
    if first == "beside":
        again = threading.Thread(target=lambda: [rlhf_patches.apply(children=True) for _ in range(20)])
        again.start()
    found = [*items]
    if first == "beside": again.join()
    found += [*loader]
    pids = {{int(pid) for pid, _ in found}}
    print(len(found), sum(int(patched) for _, patched in found), len(pids))
if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def loaders(world: World, number: int) -> Iterator[Counted]:
    """DataLoader's workers, started before and after `apply`: in two epochs, 128 items from 8 workers."""
    script = world.slime / "loads.py"
    script.write_text(LOADER)
    for method in ("spawn", "forkserver", "fork"):
        for first in ("before", "beside"):
            ended = [
                wait(
                    subprocess.Popen(
                        [world.installed.python, str(script), method, first],
                        env=world.installed.environment({"OMP_NUM_THREADS": "1", **(ON if first == "beside" else {})}),
                        cwd=world.slime,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        text=True,
                    )
                )
                for _ in range(number)
            ]
            yield count(
                f"DataLoader, {method}, apply {first}",
                ended,
                lambda each: each[:2] == (0, "128 128 8\n"),
                f"{8 * number} workers",
            )


# ------------------------------------------------------------------------------------------ all of it


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parts = ("imports", "together", "disks", "loaders")
    parser.add_argument("part", nargs="*", choices=[*parts, []], help="of these (default: all)")
    parser.add_argument("--count", type=int, help="processes of a part (default: 1000 imports, 64, 64, 2)")
    options = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        installed = Installed.create(folder / "environment", build_wheel(folder / "wheel"))
        world = World(installed, toy_slime.write(folder / "slime"))
        runs: dict[str, Callable[[], Iterator[Counted]]] = {
            "imports": lambda: imports(world, options.count or 1000),
            "together": lambda: together(world, options.count or 64, folder),
            "disks": lambda: disks(world, options.count or 64, folder),
            "loaders": lambda: loaders(world, options.count or 2),
        }
        print(f"{'':38}processes  right  lost  hung   CPU s  clock", flush=True)
        for part in options.part or parts:
            before, began = _cpu(), time.monotonic()
            for row in runs[part]():
                lost = row.processes - row.right - row.hung
                took, clock = _cpu() - before, time.monotonic() - began
                figures = f"{row.processes:>9}{row.right:>7}{lost:>6}{row.hung:>6}{took:>8.0f}{clock:>7.0f}"
                print(f"{row.what:38}{figures}  {row.notes}", flush=True)
                wrong += row.processes - row.right
                before, began = _cpu(), time.monotonic()
    return 1 if wrong else 0


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
