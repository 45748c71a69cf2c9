"""Enter training the way ms-swift, Megatron-Bridge and verl do, with their own installed code.

Each `install_*` makes the call that puts `no_sync_func` and its kin on a model's config when training
starts, as the framework's trainer does; a harness calls one at the beginning of every rollout. The model
chunks are real megatron-core `DistributedDataParallel` modules, and all that the called function runs is
real as well.

An entry looks its function up each time, in the module or class that defines it, as the framework itself
would. A test that wants the reference that somebody took before a patch was applied gets it from
`function` and passes it back in as `call`.

Frameworks are imported on first use only, so `megatron_on_cpu.install()` and `rlhf_patches.apply()` may come
after this module's import. tests/environments/frameworks.txt says what has to be installed.
"""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
Call = Callable[..., Any] | None

TARGETS = {
    "swift": "swift.megatron.trainers.base:BaseMegatronTrainer.setup_model_training",
    "megatron_bridge": "megatron.bridge.training.setup:_update_model_config_funcs",
    "verl": "verl.utils.megatron_utils:register_megatron_training_hooks",
}


def function(name: str) -> Callable[..., Any]:
    """The framework's real function, as its module or class holds it right now."""
    from tests.harness import absent_packages

    absent_packages.install()
    module, _, qualified_name = TARGETS[name].partition(":")
    found: Any = importlib.import_module(module)
    return functools.reduce(getattr, qualified_name.split("."), found)


def install_swift(chunks: list[Any], config: Any, optimizer: Any, ddp_config: Any, call: Call = None) -> None:
    """As ms-swift's `setup_training` and its Ray worker's `setup` do.

    The trainer is a real one without its `__init__`, which would load a model from disk: it has the
    attributes that `setup_model_training` reads and no others.
    """
    call = call or function("swift")
    from swift.megatron.trainers.base import BaseMegatronTrainer
    from swift.megatron.trainers.utils import TrainerState
    from swift.megatron.utils import enable_forward_pre_hook, should_disable_forward_pre_hook

    class Trainer(BaseMegatronTrainer):
        def forward_step(self, data_iterator: Any, model: Any) -> Any:  # abstract in the base class
            raise NotImplementedError

    trainer = object.__new__(Trainer)
    trainer.args = types.SimpleNamespace(
        is_multimodal=False,
        nccl_comm_warmup=False,
        align_grad_reduce=True,
        align_param_gather=ddp_config.align_param_gather,
        overlap_grad_reduce=ddp_config.overlap_grad_reduce,
        overlap_param_gather=ddp_config.overlap_param_gather,
        use_distributed_optimizer=ddp_config.use_distributed_optimizer,
        use_megatron_fsdp=False,
    )
    trainer.config = config
    trainer.optimizer = optimizer
    trainer.wrapped_models = chunks
    trainer.unwrapped_models = [chunk.module for chunk in chunks]
    trainer.state = TrainerState()
    trainer.callbacks = []
    call(trainer)
    if should_disable_forward_pre_hook(trainer.args):
        # ms-swift goes on without forward pre-hooks until its first step is done. Its first step is not
        # ours: leave the hooks on, as the other entries do, to whoever runs the steps.
        enable_forward_pre_hook(chunks)
        config.param_sync_func = trainer._saved_param_sync_func


def install_megatron_bridge(chunks: list[Any], config: Any, optimizer: Any, ddp_config: Any, call: Call = None) -> None:
    """As Megatron-Bridge's `setup` does."""
    call = call or function("megatron_bridge")
    from megatron.core.process_groups_config import ProcessGroupCollection

    call(
        chunks,
        config,
        ddp_config,
        optimizer,
        align_grad_reduce=True,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )


def install_verl(chunks: list[Any], config: Any, optimizer: Any, ddp_config: Any, call: Call = None) -> None:
    """As verl's Megatron engine does. The function finds the configs on the chunks by itself."""
    call = call or function("verl")
    call(chunks, optimizer)
