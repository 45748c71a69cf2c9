"""A process and its children, each of which says what became of the patch: multiprocessing and DataLoader's workers.

With APPLY=top it calls `rlhf_patches.apply()` at the top of the script, which spawned children run again; with
APPLY=main below the guard, which they do not, for its children, too.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from typing import Any

from launched_ranks import look

if os.environ.get("APPLY") == "top":
    import rlhf_patches

    rlhf_patches.apply()


def job(queue: Any) -> None:
    """A child's work."""
    queue.put(look())


def children(method: str) -> list[dict[str, Any]]:
    """What two processes say."""
    context: Any = multiprocessing.get_context(method)
    queue = context.Queue()
    processes = [context.Process(target=job, args=(queue,)) for _ in range(2)]
    for process in processes:
        process.start()
    found = [queue.get() for _ in processes]
    for process in processes:
        process.join()
    return found


class Looking:
    """A data set whose items say what the worker that makes them runs."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, Any]:
        return look()


def first(batch: list[Any]) -> Any:
    """Batches of one, as they are."""
    return batch[0]


def workers(method: str) -> list[dict[str, Any]]:
    """What two workers of a DataLoader say."""
    from torch.utils.data import DataLoader

    return list(DataLoader(Looking(), num_workers=2, multiprocessing_context=method, collate_fn=first))


if __name__ == "__main__":
    if os.environ.get("APPLY") == "main":
        import rlhf_patches

        rlhf_patches.apply(children=True)
    said = {"fork before": children("fork"), "parent": [look()], "fork after": children("fork")}
    said |= {"DataLoader fork": workers("fork"), "DataLoader spawn": workers("spawn"), "spawn": children("spawn")}
    print(json.dumps(said), flush=True)
