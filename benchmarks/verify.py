"""What `rlhf_patches.verify` adds to a start: ``python benchmarks/verify.py`` in an environment with torch.

Ranks are spawned processes on this machine, gloo, one thread each. In each round every rank initializes a process
group, waits at a barrier, and verifies; the figure of a round is the slowest rank's, and ratios are taken within a
round, whose parts the machine treats alike. "Exchange alone" leaves out what a rank does by itself: patches that are
pending have their source read. Operations on the store and collectives are counted, not timed.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Counting:
    """A store that counts what is asked of it."""

    def __init__(self, store: Any, operations: collections.Counter[str]) -> None:
        self._store, self._operations = store, operations

    def __getattr__(self, name: str) -> Any:
        if name != "has_extended_api":  # asks no store
            self._operations[name] += 1
        return getattr(self._store, name)


def on_each_rank(rank: int, ranks: int, ports: list[int], folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(rank), WORLD_SIZE=str(ranks))
    import torch

    torch.set_num_threads(1)
    dist = torch.distributed

    import rlhf_patches
    from rlhf_patches.runs import process_group

    rlhf_patches.apply()
    operations: collections.Counter[str] = collections.Counter()
    look_up = process_group._look_up
    rows = []
    for number, port in enumerate(ports):
        os.environ["MASTER_PORT"] = str(port)
        row = {}
        for name, function in (
            ("init_process_group", lambda: dist.init_process_group("gloo")),
            ("first barrier", dist.barrier),  # connects the ranks
            ("barrier", dist.barrier),
            ("verify", rlhf_patches.verify),
            ("barrier after", dist.barrier),
            ("its exchange alone", lambda: exchange(process_group, look_up)),
        ):
            started = time.perf_counter()
            function()
            row[name] = time.perf_counter() - started
        rows.append(row)
        if number == 0:
            found = look_up(None)
            counted = dataclasses.replace(found, store=Counting(found.store, operations))
            process_group._look_up = lambda group, counted=counted: counted
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                rlhf_patches.verify()
            process_group._look_up = look_up
            collectives = sum(event.name.startswith("c10d::") for event in profile.events())
        dist.barrier()
        dist.destroy_process_group()
    report = {"rows": rows, "operations": operations, "collectives": collectives}
    Path(folder, f"{rank}.json").write_text(json.dumps(report))


def exchange(distributed: Any, look_up: Any) -> None:
    """Without finding out what this rank has: what the store costs."""
    from rlhf_patches.runs import process_group

    group = look_up(None)
    process_group._Exchange(group, 600.0).run(process_group.Process.own(group.rank, dict))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    import torch.multiprocessing as multiprocessing

    print(f"medians of {options.rounds} rounds, the slowest rank of each; {os.cpu_count()} cores")
    print(
        "ranks  init_process_group  barrier  verify    of init  of barrier  exchange alone  of init  of barrier  "
        "  store operations/rank  collectives"
    )
    for ranks in options.ranks:
        ports = [free_port() for _ in range(options.rounds)]
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(on_each_rank, (ranks, ports, folder), nprocs=ranks)
            reports = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
        rounds = [
            {name: max(report["rows"][number][name] for report in reports) for name in reports[0]["rows"][0]}
            for number in range(options.rounds)
        ]

        def median(name: str, over: str | None = None, rounds: Any = rounds) -> float:
            return statistics.median(row[name] / (row[over] if over else 1e-3) for row in rounds)

        operations = sum(sum(report["operations"].values()) for report in reports)
        collectives = sum(report["collectives"] for report in reports)
        exchange_name = "its exchange alone"
        print(
            f"{ranks:5d}  {median('init_process_group'):15.1f} ms  {median('barrier'):4.1f} ms  "
            f"{median('verify'):6.1f} ms  {median('verify', 'init_process_group'):6.2f} x  "
            f"{median('verify', 'barrier'):8.1f} x  {median(exchange_name):11.1f} ms  "
            f"{median(exchange_name, 'init_process_group'):6.2f} x  {median(exchange_name, 'barrier'):8.1f} x  "
            f"{operations / ranks:23.1f}  {collectives:11d}",
            flush=True,
        )


if __name__ == "__main__":
    main()
