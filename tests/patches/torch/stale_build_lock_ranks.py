"""Builds of a C++ extension that are killed, wait or fail: ``--out FOLDER [--short SECONDS] CASE ...``.

As the proof of torch-stale-build-lock: builders that live, are elsewhere or fail, and several processes at once.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
from typing import Any

from torch.utils._filelock import FileLock

from rlhf_patches.patches.torch import _build_lock
from rlhf_patches.patches.torch.proofs import stale_build_lock_ranks
from rlhf_patches.patches.torch.proofs.stale_build_lock_ranks import Station


def killed_with_the_patch(station: Station) -> dict[str, Any]:
    left = station.killed(patched=True)
    return {"left": left, "without": station.start(patched=False).still_waits(1), "with": station.start().result()}


def several(station: Station) -> dict[str, Any]:
    """Some wait at a lock of a dead builder: how many of them compile."""
    station.killed(patched=False)
    before = station.compilations
    started = [station.start() for _ in range(4)]
    return {"results": [each.result() for each in started], "compilations": station.compilations - before}


def living(station: Station) -> dict[str, Any]:
    """A builder that lives, with the patch or without it, and who waits for it, with or without."""
    found: dict[str, Any] = {}
    for patched in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            own = Station(folder)
            builder = own.builder(patched=patched)
            waiting = [own.start(patched=each) for each in (True, False)]
            ended = [waiting[0].ended(stale_build_lock_ranks.SHORT), waiting[1].ended(0)]
            own.hold.unlink()
            results = [each.result() for each in (builder, *waiting)]
            found[str(patched)] = {"ended": ended, "results": results, "compilations": own.compilations}
    return found


def orphans(station: Station) -> dict[str, Any]:
    """A builder is killed alone: ninja, whose own parent nobody is now, and the compiler work on."""
    found: dict[str, Any] = {}
    for patched in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            own = Station(folder)
            builder = own.builder(patched=patched)
            os.kill(builder.pid, signal.SIGKILL)
            builder.ended()
            waiting = own.start()
            ended = waiting.ended(stale_build_lock_ranks.SHORT)
            own.hold.unlink()
            found[str(patched)] = {"ended": ended, "result": waiting.result()}
    return found


def elsewhere(station: Station) -> dict[str, Any]:
    """The lock of a builder on another machine, in a file system that is shared, and in one that is not."""
    station.killed(patched=True)
    owner = {**json.loads(station.lock.read_text()), "boot": "another", "host": "another-host"}
    station.lock.write_text(json.dumps(owner))
    own, _build_lock.OWN = _build_lock.OWN, set()
    shared = station.start()
    waits = not shared.ended(stale_build_lock_ranks.SHORT)
    station.lock.unlink()
    _build_lock.OWN = own
    shared_result = shared.result()
    station.lock.write_text(json.dumps(owner))
    return {"waits": waits, "shared": shared_result, "own": station.start().result()}


def recycled(station: Station) -> dict[str, Any]:
    """The lock of a dead builder, whose process id another process has now."""
    station.killed(patched=True)
    owner = {**json.loads(station.lock.read_text()), "pid": os.getppid()}
    station.lock.write_text(json.dumps(owner))
    return {"with": station.start().result()}


def raising(station: Station) -> dict[str, Any]:
    """A builder whose compiler fails: who waits for it fails as well, as without the patch."""
    found: dict[str, Any] = {}
    for patched in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            own = Station(folder)
            (own.folder / "tiny.cpp").write_text("no program\n")
            builder = own.builder(patched=patched)
            waiting = own.start(patched=patched)
            waiting.ended(1)
            own.hold.unlink()
            results = [each.result() for each in (builder, waiting)]
            found[str(patched)] = [each["error"].partition("(")[0] for each in results]
            found[str(patched)].append(own.lock.exists())
    return found


def again(station: Station) -> dict[str, Any]:
    """A process that has loaded the extension loads it again, beside a lock that is nobody's, which it takes over."""
    return {"with": station.start(again=True).result(), "compilations": station.compilations}


def newer(station: Station) -> dict[str, Any]:
    """CoInstalled torch 2.14, which holds the file by the same `FileLock` while it builds, and leaves it there."""
    station.lock.parent.mkdir(parents=True)
    with FileLock(station.lock):
        waiting = station.start()
        ended = waiting.ended(stale_build_lock_ranks.SHORT)
    found = {"left": station.lock.read_text(), "ended": ended, "with": waiting.result()}
    with FileLock(station.lock):
        pass
    return {**found, "without": station.start(patched=False).still_waits()}


def opened(station: Station) -> dict[str, Any]:
    """Others open the file while the kernel is asked for a lease: nobody is ended by its signal."""
    station.lock.parent.mkdir(parents=True)
    station.lock.touch()
    own, child = os.getpid(), os.fork()
    if child == 0:
        while os.getppid() == own:
            try:
                os.close(os.open(station.lock, os.O_RDWR | os.O_NONBLOCK))
            except BlockingIOError:
                pass
        os._exit(0)
    seen = [_build_lock._look(str(station.lock), ()).alive for _ in range(300)]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return {"alive": sum(map(bool, seen)), "of": len(seen)}


CASES = {
    **stale_build_lock_ranks.CASES,
    **{
        each.__name__: each
        for each in (
            *(killed_with_the_patch, several, living, orphans, elsewhere, recycled, raising, again, newer, opened),
        )
    },
}


def main() -> None:
    stale_build_lock_ranks.main(CASES)
