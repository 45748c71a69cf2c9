"""This process's place in a distributed run: as its launcher says in the environment, else torch.distributed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass

# What launchers call rank, local rank and world size. The first whose rank is set counts: torchrun under srun has both,
# and RANK is the one that training uses. Not SLURM_NTASKS: it is set in a batch script too, where nobody is a rank yet.
_LAUNCHERS = (
    ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
)


@dataclass(frozen=True)
class Place:
    """Rank, rank on its host, and number of ranks, as text; None where nobody has said."""

    rank: str | None = None
    local_rank: str | None = None
    world_size: str | None = None


def place() -> Place:
    """What is known now. Ray's workers learn their rank late, some only with their process group."""
    for rank, local_rank, world_size in _LAUNCHERS:
        if rank in os.environ:
            return Place(os.environ[rank], os.environ.get(local_rank), os.environ.get(world_size))
    distributed = sys.modules.get("torch.distributed")  # never imported for this
    try:
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return Place(str(distributed.get_rank()), None, str(distributed.get_world_size()))
    except Exception:  # half imported, or its process group is just being taken down
        pass
    return Place()


def ranks_text(ranks: Iterable[int]) -> str:
    """``rank 7`` or ``ranks 0-6, 9``."""
    numbers = sorted(ranks)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {text}"
