"""Real DeepSpeed ZeRO-3 on CPU ranks: process group, partitioned parameters, and a count of what is communicated."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import functools
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_DEEPSPEED: Any = importlib.util.find_spec("deepspeed")
# DeepSpeed compiles one small operator on first use and transformers looks for a GPU. Set before they are imported.
os.environ.update(
    DS_ACCELERATOR="cpu",
    ACCELERATE_USE_DEEPSPEED="true",
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_VERBOSITY="error",
    TOKENIZERS_PARALLELISM="false",
    DEEPSPEED_LOG_LEVEL="error",
    # Each DeepSpeed its own: two versions would compile the operator anew in turn. Beside it, and not in sys.prefix,
    # for an environment that only borrows it.
    TORCH_EXTENSIONS_DIR=str(Path(_DEEPSPEED.origin).parents[4] / "torch_extensions"),
)

import torch
import torch.distributed as dist

COLLECTIVES = ("all_gather_into_tensor", "all_gather", "all_reduce", "broadcast", "reduce_scatter_tensor", "barrier")


class Communication:
    """The collectives that this rank has entered, in order, with the bytes that each delivers here."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        for name in COLLECTIVES:  # before DeepSpeed is imported, which takes references
            setattr(dist, name, self._noting(name, getattr(dist, name)))

    def _noting(self, name: str, function: Any) -> Any:
        def noting(*args: Any, **kwargs: Any) -> Any:
            outputs = (*args[:1], *(kwargs.get(key) for key in ("output_tensor", "tensor", "output")))
            tensors = [x for x in outputs if isinstance(x, torch.Tensor)]
            self.calls.append((name, sum(x.numel() * x.element_size() for x in tensors)))
            return function(*args, **kwargs)

        return noting

    @contextlib.contextmanager
    def during(self) -> Iterator[list[tuple[str, int]]]:
        """What is entered within the block."""
        start = len(self.calls)
        seen: list[tuple[str, int]] = []
        try:
            yield seen
        finally:
            seen += self.calls[start:]


@functools.cache
def communication() -> Communication:
    """Count from now on. Must precede DeepSpeed's import."""
    return Communication()


def compile_operator() -> None:
    """DeepSpeed's own, the first time; by one process at a time.

    A process that was killed while it compiled has left torch's lock behind, for which all others wait without end.
    """
    from deepspeed.comm.torch import build_shm_op

    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    folder.mkdir(exist_ok=True)
    with open(folder / "compiling", "w") as ours:
        fcntl.flock(ours, fcntl.LOCK_EX)
        for left in folder.glob("*/lock"):
            left.unlink(missing_ok=True)
        build_shm_op()


def start() -> tuple[int, Communication]:
    """One thread a rank, so that sums are deterministic, and the process group; returns the rank."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    counted = communication()
    compile_operator()
    from accelerate import PartialState

    # For the trainer this comes before SFTConfig.
    state = PartialState(backend="gloo", timeout=datetime.timedelta(minutes=5))
    import deepspeed

    deepspeed.init_distributed("gloo")
    return state.process_index, counted


def wait_at_most(seconds: float) -> None:
    """Collectives that the other rank does not enter fail after so long."""
    torch.distributed.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds), dist.group.WORLD)


def partition(module: torch.nn.Module) -> torch.nn.Module:
    """Hand a module's parameters to ZeRO-3; they are partitioned afterwards."""
    import deepspeed

    parameters = list(module.parameters())
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    deepspeed.zero.Init(module=module, config_dict_or_path=config, dtype=parameters[0].dtype)
    assert not any(map(available, parameters))
    return module


def available(parameter: Any) -> bool:
    """Whether a parameter of ZeRO-3 is gathered."""
    return parameter.ds_status.name == "AVAILABLE"
