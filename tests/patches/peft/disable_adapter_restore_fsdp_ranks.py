"""The reference pass between the policy's forward and backward pass under FSDP, on each of two ranks: ``--out FOLDER``.

FSDP (the first) shows views of its flat parameter in place of parameters there, and parameters again afterwards. Before
apply() of peft-disable-adapter-restore, after it, and after revert().
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from rlhf_patches.patches.peft.proofs import small
from rlhf_patches.proving import states

NAME = "peft-disable-adapter-restore"


def step(strategy: ShardingStrategy, wrapped: bool, frozen: str) -> dict[str, Any]:
    """Of a policy whose adapter is frozen in part: what is trainable afterwards, and the norm of the gradient."""
    config = LoraConfig(r=small.RANK, lora_alpha=small.ALPHA, target_modules=["up", "down"])
    model = get_peft_model(small.Small(), config)
    small.fill(model)
    for name, parameter in model.named_parameters():
        if frozen and frozen in name:
            parameter.requires_grad_(False)
    wanted = [name for name, flag in small.flags(model).items() if flag]
    gradients = small.gradients_in_float64(model, "default")
    sharded = FullyShardedDataParallel(
        model,
        sharding_strategy=strategy,
        use_orig_params=True,
        auto_wrap_policy=ModuleWrapPolicy({type(model.base_model.model.up)}) if wrapped else None,
        device_id=torch.device("cpu"),
    )
    score = small.loss(sharded)
    with torch.no_grad(), model.disable_adapter():
        small.loss(sharded)
    score.backward()
    norm = float(sharded.clip_grad_norm_(1e9))
    flags = {name.replace("_fsdp_wrapped_module.", ""): flag for name, flag in small.flags(model).items()}
    squares = [gradients[name].square().sum() for name in wanted]
    return {
        "as before": [name for name, flag in flags.items() if flag] == wanted,
        "norm": norm,
        "wanted": float(torch.stack(squares).sum().sqrt()),
    }


def observe() -> dict[str, Any]:
    of_gradients, whole = ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.FULL_SHARD
    return {
        "by layers": step(of_gradients, True, "lora_A"),
        "as one": step(of_gradients, False, "lora_A"),
        "nothing frozen": step(of_gradients, False, ""),
        "sharded again": step(whole, True, "lora_A"),
    }


def main() -> None:
    options = states.parser().parse_args()
    dist.init_process_group("gloo")
    states.report(NAME, observe, options.out)
    dist.destroy_process_group()
