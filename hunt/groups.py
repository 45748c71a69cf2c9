"""Process groups of adapters that have no trainer to make them."""

from __future__ import annotations

import os


def alone() -> None:
    """The variables of a launcher, in a process that nobody launched, for what reads them."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)


def start(ranks: int = 1) -> int:
    """On gloo, of one process too, which nobody launched; returns the rank."""
    import torch

    if ranks > 1:
        torch.distributed.init_process_group("gloo")
    else:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return int(torch.distributed.get_rank())


def start_megatron(tensor: int = 1, ranks: int | None = None, **sizes: int) -> None:
    """megatron-core's groups on it, so many ranks tensor parallel, or all; the same seed everywhere.

    Args:
        tensor: ranks of a tensor-parallel group.
        ranks: of all.
        sizes: of other groups, as `initialize_model_parallel` names them.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    start(ranks or tensor)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor, **sizes)
    model_parallel_cuda_manual_seed(0)
