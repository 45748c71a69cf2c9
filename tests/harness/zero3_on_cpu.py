"""Real DeepSpeed ZeRO-3 on CPU ranks: process group, partitioned parameters, and a count of what is communicated."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
from collections.abc import Iterator
from typing import Any

# transformers looks for a GPU. Set before it is imported.
os.environ.update(
    DS_ACCELERATOR="cpu",
    ACCELERATE_USE_DEEPSPEED="true",
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_VERBOSITY="error",
    TOKENIZERS_PARALLELISM="false",
    DEEPSPEED_LOG_LEVEL="error",
)

import torch
import torch.distributed as dist

from rlhf_patches.patches.deepspeed.proofs import on_cpu

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


def start() -> tuple[int, Communication]:
    """One thread a rank, so that sums are deterministic, and the process group; returns the rank."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    counted = communication()
    on_cpu.without_operator()
    from accelerate import PartialState

    # For the trainer this comes before SFTConfig.
    state = PartialState(backend="gloo", timeout=datetime.timedelta(minutes=5))
    import deepspeed

    deepspeed.init_distributed("gloo")
    return state.process_index, counted


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
