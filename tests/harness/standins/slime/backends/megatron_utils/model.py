"""The place in slime's rollout training that installs the data-parallel hooks, with its defect.

Our own text. It keeps what a patch has to recognize, and no more: the names of the module and the
function, the assertion and the installation in their form, and the message that users search for.
slime asks a global for `args`; here the caller passes it, as well as `run_steps`, which stands for
the rest of the rollout.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallel as DDP
from megatron.core.distributed import finalize_model_grads
from megatron.core.utils import get_model_config


def _one_or_all(hooks: list) -> Any:
    """A schedule without virtual pipeline stages wants the function itself, not a list of one."""
    return hooks[0] if len(hooks) == 1 else hooks


def train(
    rollout_id: int, model: Sequence[DDP], optimizer: Any, args: Namespace, run_steps: Callable[[], None]
) -> None:
    """Train on one rollout. Called once for each, with the same model and therefore the same config."""
    for chunk in model:
        chunk.train()

    config = get_model_config(model[0])
    config.timers = None
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if args.overlap_grad_reduce and isinstance(model[0], DDP):
        assert config.no_sync_func is None, (
            "When overlap_grad_reduce is True, config.no_sync_func must be None; "
            "a custom no_sync_func is not supported when overlapping grad-reduce"
        )
        config.no_sync_func = [chunk.no_sync for chunk in model]
        config.no_sync_func = _one_or_all(config.no_sync_func)
        if args.align_grad_reduce:
            config.grad_sync_func = _one_or_all([chunk.start_grad_sync for chunk in model])
    if args.overlap_param_gather and args.align_param_gather:
        config.param_sync_func = _one_or_all([chunk.start_param_sync for chunk in model])

    run_steps()
