"""This process's rank in a distributed run, from the launcher's variables, else from torch.distributed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import NamedTuple

from .import_system import no_signal

# The launchers' variables for rank, local rank and world size. The first set rank counts: torchrun under srun sets
# both, and training uses RANK. Not SLURM_NTASKS: it is also set in a batch script, where no process is a rank yet.
_LAUNCHERS = (
    ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
)
_PROGRAMS = ("/accelerate", "/accelerate-launch", "/commands/launch.py", "/deepspeed", "/launcher/launch.py")
_MOST_RUNS = 50  # contiguous ranges of ranks in a line of text


class Place(NamedTuple):
    """Rank, local rank, and number of ranks, as text; None if unknown."""

    rank: str | None = None
    local_rank: str | None = None
    world_size: str | None = None


def place() -> Place:
    """Return the current values. Ray's workers get their rank late, some only with their process group."""
    for rank, local_rank, world_size in _LAUNCHERS:
        if rank in os.environ:
            return Place(os.environ[rank], os.environ.get(local_rank), os.environ.get(world_size))
    distributed = sys.modules.get("torch.distributed")  # never imported for this
    try:
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return Place(str(distributed.get_rank()), None, str(distributed.get_world_size()))
    except no_signal(Exception):  # half-imported, or its process group is being destroyed
        pass
    return Place()


def is_launcher() -> bool:
    """Whether this program imports a framework only to start other processes."""
    program: str = (getattr(sys, "argv", None) or [""])[0]
    return program.endswith(_PROGRAMS)


def ranks_text(ranks: Iterable[int | range]) -> str:
    """Return ``rank 7`` or ``ranks 0-6, 9``; only the first of very many ranges. Ranges are not enumerated."""
    pieces = (each if isinstance(each, range) else range(each, each + 1) for each in ranks)
    runs: list[range] = []
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if runs and piece.start == runs[-1].stop:
            runs[-1] = range(runs[-1].start, piece.stop)
        else:
            runs.append(piece)
    texts = [str(run.start) if run.stop == run.start + 1 else f"{run.start}-{run.stop - 1}" for run in runs]
    more = f" and {len(texts) - _MOST_RUNS} more such" if len(texts) > _MOST_RUNS else ""
    several = len(runs) != 1 or runs[0].stop > runs[0].start + 1
    return f"{'ranks' if several else 'rank'} {', '.join(texts[:_MOST_RUNS])}{more}"
