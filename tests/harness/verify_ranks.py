"""What happens on each rank in the tests of `rlhf_patches.verify`: real torch.distributed, gloo, a make-believe slime.

``verify_ranks.py SCENARIO``, by `ranks.run` or `ranks.run_forked`: the last line on stdout is a report, in JSON.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import toy_slime

RANK = int(os.environ["RANK"])
MODEL = "slime.backends.megatron_utils.model"


def said_by(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str | None:
    """What an exception says, None if there is none."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def start(**options: Any) -> Any:
    """torch.distributed, initialized."""
    import torch.distributed as dist

    dist.init_process_group("gloo", **options)
    return dist


def end() -> None:
    """Destroy the group on all ranks, and have the next one meet elsewhere: gloo cannot do that in the same store."""
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()
    os.environ["MASTER_PORT"], _, os.environ["MORE_PORTS"] = os.environ["MORE_PORTS"].partition(",")


def wait_for(*others: int) -> None:
    """Return when these ranks have called `go_on`."""
    import torch

    for other in others:
        torch.distributed.recv(torch.zeros(1), other)


def go_on(waiting: int) -> None:
    """See `wait_for`."""
    import torch

    torch.distributed.send(torch.zeros(1), waiting)


# ------------------------------------------------------------------------------------- verify(), called


def before_torch() -> dict[str, Any]:
    """Nobody has imported it."""
    from rlhf_patches import verify

    return {"verify": said_by(verify), "torch": "torch" in sys.modules}


def calls() -> dict[str, Any]:
    """One world of three ranks, one thing after another."""
    import torch

    import rlhf_patches
    from rlhf_patches import verify

    said: dict[str, Any] = {}
    said["before the group"] = said_by(verify)
    dist = start()
    said["never applied"] = said_by(verify)
    if RANK != 1:
        rlhf_patches.apply()
    said["applied on two of three"] = said_by(verify)
    rlhf_patches.apply()
    said["pending everywhere"] = said_by(verify)
    if RANK == 0:
        importlib.import_module(MODEL)
    said["imported on one"] = said_by(verify)
    said["statuses"] = rlhf_patches.report()[toy_slime.PATCH].status.value
    if RANK == 2:
        rlhf_patches.revert(toy_slime.PATCH)
    said["reverted on one"] = said_by(verify)

    groups = {"0 and 1": dist.new_group([0, 1]), "1 and 2": dist.new_group([1, 2])}
    said["groups"] = {name: said_by(verify, group) for name, group in groups.items()}
    alone = [dist.new_group([rank]) for rank in range(3)]
    said["alone"] = [said_by(verify, group) for group in alone]
    if RANK == 2:
        rlhf_patches.apply()
    said["applied again"] = said_by(verify, timeout=datetime.timedelta(minutes=1))

    said["wrong"] = [said_by(verify, timeout=value) for value in ("60", 0, -1, float("nan"), float("inf"), True, None)]
    said["wrong"] += [said_by(verify, 3)]
    said["after wrong arguments"] = said_by(verify)

    seen = {}
    for name, function in (("verify", verify), ("barrier", dist.barrier)):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            function()
        seen[name] = sorted({event.name for event in profile.events() if "c10d" in event.name or "gloo" in event.name})
    said["collectives"] = seen
    said["store"] = operations(verify)

    if RANK == 1:
        wait_for(0, 2)
    said["late"] = said_by(verify, timeout=6)
    if RANK != 1:
        go_on(1)
    said["after a late rank"] = said_by(verify)

    end()
    said["destroyed"] = said_by(verify)
    start()
    said["initialized again"] = said_by(verify)
    if RANK == 1:
        rlhf_patches.revert(toy_slime.PATCH)
    said["initialized again, differing"] = said_by(verify)
    return said


def operations(verify: Callable[[], None]) -> list[str]:
    """The store operations of one call on this rank, in order."""
    from rlhf_patches.runs import process_group

    found: list[str] = []

    class Noting:
        def __init__(self, store: Any) -> None:
            self._store = store

        def __getattr__(self, name: str) -> Any:
            found.append(name)
            return getattr(self._store, name)

    look_up: Any = process_group._look_up

    def noting(group: Any) -> Any:
        return dataclasses.replace(look_up(group), store=Noting(look_up(group).store))

    process_group._look_up = noting
    try:
        verify()
    finally:
        process_group._look_up = look_up
    return found


def leaves_at_once() -> dict[str, Any]:
    """The store is in rank 0's process, which ends as soon as it has its verdict; the others must get theirs."""
    import rlhf_patches

    if RANK == 0:
        rlhf_patches.apply()
    start()
    if RANK != 0:
        from rlhf_patches.runs import process_group

        exchanges: Any = process_group._Exchange
        wait = exchanges._wait_for_verdict

        def wait_longer(exchange: Any) -> Any:
            verdict = wait(exchange)
            time.sleep(1)
            return verdict

        exchanges._wait_for_verdict = wait_longer
    return {"verify": said_by(rlhf_patches.verify)}


def backend(name: str) -> dict[str, Any]:
    """A group without other processes, or another kind of store."""
    import torch.distributed as dist

    import rlhf_patches

    if name == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=64, store=FakeStore())
    else:
        dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=RANK, world_size=2)
    if name == "file" and RANK == 0:
        rlhf_patches.apply()
    return {"verify": said_by(rlhf_patches.verify), "late": name == "file" and missing_by_file()}


def missing_by_file() -> str | None:
    """Rank 1 does not come."""
    import rlhf_patches

    if RANK == 1:
        wait_for(0)
        return None
    said = said_by(rlhf_patches.verify, timeout=2)
    go_on(1)
    return said


# ------------------------------------------------------------------------------------- RLHF_PATCHES_VERIFY


def by_itself(order: str) -> dict[str, Any]:
    """``order`` says what comes first. Ranks differ in RLHF_PATCHES_DISABLE, so a comparison shows as an error."""
    said: dict[str, Any] = {}
    if order == "torch first":
        from torch.distributed import init_process_group as taken_before
    if order == "group first":
        start()
    if order != "site hook":
        import rlhf_patches

        said["apply"] = said_by(rlhf_patches.apply)
    import torch.distributed as dist

    if order == "torch first":
        said["init"] = said_by(taken_before, "gloo", None, datetime.timedelta(seconds=60))
    elif order != "group first":
        said["init"] = said_by(dist.init_process_group, "gloo")
    said["initialized"] = dist.is_initialized()
    if order == "group first":
        said["apply again"] = said_by(rlhf_patches.apply)
    end()
    said["init again"] = said_by(dist.init_process_group, "gloo")
    import rlhf_patches

    end()
    rlhf_patches.revert()
    said["init after revert()"] = said_by(dist.init_process_group, "gloo")
    if said["init after revert()"] is None:
        dist.barrier()  # the store is in rank 0's process, and the other may be still reading in it
    said["signature"] = str(__import__("inspect").signature(dist.init_process_group)).split(",")[0]
    return said


def init_only(seconds: str = "60", first: str = "") -> dict[str, Any]:
    """What a script of anybody's does; on a rank without rlhf_patches too. Or ``first`` it calls apply()."""
    try:
        import rlhf_patches

        there = True
    except ImportError:
        there = False
    if first == "apply":
        rlhf_patches.apply()
    said = {"there": there, "init": said_by(start, timeout=datetime.timedelta(seconds=float(seconds)))}
    if not there:
        time.sleep(2)  # it waits for nobody, and gloo may be connecting the others yet
    return said


# ------------------------------------------------------------------------------------- killed


def killed(when: str, seconds: str) -> dict[str, Any]:
    """The rank that VICTIM names kills itself in verify(): before it has said what it has, or after."""
    import rlhf_patches
    from rlhf_patches.runs import process_group

    victim = int(os.environ["VICTIM"])
    dist = start()
    if victim != RANK:
        go_on(victim)
    else:
        wait_for(*(rank for rank in range(dist.get_world_size()) if rank != victim))  # gloo may be connecting them yet

        def die(*_: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        exchanges: Any = process_group._Exchange
        setattr(exchanges, {"before": "_run", "after": "_wait_for_verdict"}[when], die)
        if when == "after":  # it may be the last to come, and would then not wait
            exchanges._decide = die
    started = time.monotonic()
    said = said_by(rlhf_patches.verify, timeout=float(seconds))
    return {"verify": said, "seconds": time.monotonic() - started}


if __name__ == "__main__":
    scenario = {f.__name__: f for f in (before_torch, calls, leaves_at_once, backend, by_itself, init_only, killed)}[
        sys.argv[1]
    ]
    print(json.dumps(scenario(*sys.argv[2:])), flush=True)
    os._exit(0)  # ranks may be at different points, and torch's shutdown waits
