"""transformers' Trainer, and those that stand on it, in ZeRO or FSDP on CPU ranks: arguments, and what is whole again.

accelerate shards with FSDP on accelerators only, so CPU ranks tell it that they are some. All ranks have to call what
gathers.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

KINDS = ("zero2", "zero3", "fsdp1", "fsdp2")
_FSDP1 = {"sync_module_states": "false", "use_orig_params": "true"}


def arguments(kind: str | None, dtype: str = "float32") -> dict[str, Any]:
    """Those of TrainingArguments, besides the others, for one of KINDS; none for None."""
    if kind is None:
        return {}
    of_accelerator = {"accelerator_config": {"use_configured_state": True}}
    if kind.startswith("fsdp"):
        own = {"version": int(kind[-1]), "cpu_ram_efficient_loading": "false"}
        return {
            **of_accelerator,
            "use_cpu": False,
            "fsdp": True,
            "fsdp_config": {**own, **(_FSDP1 if kind == "fsdp1" else {})},
        }
    from rlhf_patches.patches.deepspeed.proofs import on_cpu

    config = on_cpu.of_trainer(int(kind[-1]))
    return {**of_accelerator, "deepspeed": config, "bf16": dtype == "bfloat16"}


def prepare(kind: str | None) -> None:
    """Before a trainer's arguments are made."""
    if kind is None:
        return
    import torch
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    if kind.startswith("fsdp"):
        PartialState(cpu=True, backend="gloo")
        PartialState._shared_state.update(distributed_type=DistributedType.MULTI_GPU, device=torch.device("cpu"))
    else:
        from rlhf_patches.patches.deepspeed.proofs import on_cpu

        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        on_cpu.without_operator()
        PartialState(backend="gloo")
        on_cpu.start()


@contextlib.contextmanager
def gathered(trainer: Any) -> Iterator[None]:
    """While all of a model's parameters are whole, and FSDP1's gradients."""
    partitioned = [each for each in trainer.model.parameters() if hasattr(each, "ds_id")]
    with contextlib.ExitStack() as stack:
        if partitioned:
            import deepspeed

            stack.enter_context(deepspeed.zero.GatheredParameters(partitioned))
        if (root := fsdp1_root(trainer)) is not None:
            stack.enter_context(root.summon_full_params(root, writeback=False, with_grads=True))
        yield


def fsdp1_root(trainer: Any) -> Any:
    """The module of a trainer that has sharded its model so, compiled or not; None of others."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrapped = getattr(trainer.model_wrapped, "_orig_mod", trainer.model_wrapped)
    return wrapped if isinstance(wrapped, FullyShardedDataParallel) else None


def full(tensor: Any) -> Any:
    """A tensor of its own, of all ranks where it is FSDP2's."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def name_of(parameter: str) -> str:
    """As it is without wrappers."""
    return parameter.replace("_fsdp_wrapped_module.", "").replace("_orig_mod.", "")


def gradients(trainer: Any) -> dict[str, Any]:
    """Of all that is trained, whole, before the optimizer's step; DeepSpeed has taken its step by then (`watch`)."""
    with gathered(trainer):
        named = {name_of(name): each.grad for name, each in trainer.model.named_parameters()}
        return {name: full(each) for name, each in named.items() if each is not None}


def watch(trainer: Any, found: dict[str, Any]) -> None:
    """Put the gradient of each of DeepSpeed's steps into ``found``: it steps within Trainer's backward."""
    from deepspeed.utils import safe_get_full_grad

    engine, step = trainer.model_wrapped, trainer.model_wrapped.step
    count = 0

    def noted(*arguments: Any, **named: Any) -> Any:
        nonlocal count
        if engine.is_gradient_accumulation_boundary():
            for name, each in trainer.model.named_parameters():
                if (whole := safe_get_full_grad(each)) is not None:
                    found[f"step {count} {name_of(name)}"] = whole.detach().clone()
            count += 1
        return step(*arguments, **named)

    engine.step = noted
