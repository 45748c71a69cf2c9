"""Real DeepSpeed on CPU ranks, in the first release on the path: process group, engine, tiny data.

A worker calls `start` first; zero3_on_cpu.py has what TRL needs in addition.
"""

from __future__ import annotations

import datetime
import importlib
import os
import sys
from typing import Any

# DeepSpeed searches for a GPU at import.
os.environ.update(DS_ACCELERATOR="cpu", DEEPSPEED_LOG_LEVEL="error")

import torch
import torch.distributed as dist

LEARNING_RATE = 0.1
OFFLOADED: dict[str, Any] = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}


def without_operator() -> None:
    """Disable DeepSpeed's compiled all-reduce in shared memory, which exists for CPUs only; gloo's is used.

    The compiled one waits without a limit for the other ranks' memory. The attribute deepspeed.comm.torch is the
    package torch.
    """
    operators: Any = importlib.import_module("deepspeed.comm.torch")
    operators.build_shm_op = lambda: None


def start() -> int:
    """Set one thread per rank, so that sums are deterministic, and start the process group; returns the rank."""
    import deepspeed
    from deepspeed.runtime import utils

    torch.set_num_threads(1)
    modules: list[Any] = list(sys.modules.values())
    for module in modules:  # logs hundreds of lines about memory, each from a walk through /proc
        # By its dictionary: lazy modules have every attribute, through an import.
        if getattr(module, "__dict__", {}).get("see_memory_usage") is utils.see_memory_usage:
            module.see_memory_usage = lambda *_, **__: None
    without_operator()
    # 0.18.7 to 0.18.9 otherwise flatten parameters "on the GPU", which gives views that gloo may not write to.
    deepspeed.get_accelerator().available_memory = lambda *_: 0
    deepspeed.init_distributed("gloo", timeout=datetime.timedelta(minutes=1))
    return dist.get_rank()


def engine(
    model: torch.nn.Module,
    zero: dict[str, Any],
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: Any = None,
    /,
    **config: Any,
) -> Any:
    """A DeepSpeed engine.

    Args:
        model: the model to train.
        zero: the configuration's ``zero_optimization``.
        optimizer: SGD over all parameters if None.
        lr_scheduler: a scheduler, a callable, or None.
        config: the rest of the configuration, such as ``gradient_accumulation_steps``.
    """
    import deepspeed

    # DeepSpeed's default buckets take 2 GB per rank. Since 0.19.3 it clips at 1.0 by default; 0 disables it.
    buckets = {"reduce_bucket_size": 1000, "allgather_bucket_size": 1000, "overlap_comm": False}
    made, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer or torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
        lr_scheduler=lr_scheduler,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "zero_optimization": {**buckets, **zero},
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            **config,
        },
    )
    return made


def of_trainer(stage: int, micro_batch: int | str = "auto") -> dict[str, Any]:
    """The ``deepspeed`` argument of transformers' Trainer: small buckets, everything partitioned, no clipping."""
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 1000, "overlap_comm": False}
    zero |= {"stage3_param_persistence_threshold": 0} if stage == 3 else {"allgather_bucket_size": 1000}
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": "auto",
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": "auto"},
    }
