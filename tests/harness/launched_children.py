"""A process and its children, each of which says what became of the patch: multiprocessing and DataLoader's workers.

With APPLY=top it calls `rlhf_patches.apply()` at the top of the script, which spawned children run again; with
APPLY=main below the guard, which they do not, for its children, too.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from typing import Any

from launched_ranks import look_at_deepspeed as look

if os.environ.get("APPLY") == "top":
    import rlhf_patches

    rlhf_patches.apply()


def job(queue: Any) -> None:
    """A child's work."""
    queue.put(look())


def child(method: str) -> dict[str, Any]:
    """What a child says."""
    context: Any = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=job, args=(queue,))
    process.start()
    found = queue.get()
    process.join()
    return found


class Looking:
    """A data set whose items say what the worker that makes them runs."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        return look()


def first(batch: list[Any]) -> Any:
    """Batches of one, as they are."""
    return batch[0]


def worker(method: str) -> dict[str, Any]:
    """What a worker of a DataLoader says."""
    from torch.utils.data import DataLoader

    (found,) = DataLoader(Looking(), num_workers=1, multiprocessing_context=method, collate_fn=first)
    return found


if __name__ == "__main__":
    if os.environ.get("APPLY") == "main":
        import rlhf_patches

        rlhf_patches.apply(children=True)
    said = {"fork before": child("fork"), "parent": look(), "fork after": child("fork")}
    said |= {"DataLoader fork": worker("fork"), "DataLoader spawn": worker("spawn"), "spawn": child("spawn")}
    print(json.dumps(said), flush=True)
