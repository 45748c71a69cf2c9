"""A policy and its reference under FSDP on each of two ranks: ``--out FOLDER``, with a release of PEFT on sys.path.

Each step before apply() of peft-disable-adapter-fsdp, after it, and after revert().
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from rlhf_patches.patches.peft.proofs import small
from rlhf_patches.proving import states

NAME = "peft-disable-adapter-fsdp"


class Worded(torch.nn.Module):
    """An embedding, whose adapters are bare parameters, before the small model."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(8, small.WIDTH)
        self.small = small.Small()
        small.fill(self)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.small(self.words(words))


class Margin(torch.nn.Module):
    """The policy's score and the reference's, computed second, in one forward pass."""

    def __init__(self, policy: PeftModel) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return margin(self.policy, self.policy, words)


def margin(model: Any, policy: PeftModel, words: torch.Tensor) -> torch.Tensor:
    """As in DPO: computes the reference without a gradient while the policy's graph is alive."""
    score = model(words).square().mean()
    with torch.no_grad(), policy.disable_adapter():
        reference = model(words).square().mean()
    return (score - reference).square()


def policy() -> PeftModel:
    """A policy with a second adapter, which is not active."""

    def lora(**more: Any) -> LoraConfig:
        return LoraConfig(r=small.RANK, lora_alpha=small.ALPHA, target_modules=["words", "up"], **more)

    model = get_peft_model(Worded(), lora(modules_to_save=["head"]))
    model.add_adapter("other", lora())
    model.set_adapter("default")
    small.fill(model)
    return model


def words(rank: int) -> torch.Tensor:
    return torch.randint(8, (6,), generator=torch.Generator().manual_seed(rank))


def second(model: Any, peft: PeftModel, given: torch.Tensor) -> torch.Tensor:
    """Between the policy's forward and its backward pass."""
    return margin(model, peft, given)


def within(model: Any, peft: PeftModel, given: torch.Tensor) -> torch.Tensor:
    """Within the forward pass of a module that FSDP has wrapped."""
    return model(given)


def first(model: Any, peft: PeftModel, given: torch.Tensor) -> torch.Tensor:
    """While no parameter is gathered: never wrong."""
    with torch.no_grad(), peft.disable_adapter():
        reference = model(given).square().mean()
    return (model(given).square().mean() - reference).square()


STEPS = {
    second: ShardingStrategy.SHARD_GRAD_OP,
    within: ShardingStrategy.FULL_SHARD,
    first: ShardingStrategy.SHARD_GRAD_OP,
}


def sharded(model: torch.nn.Module, strategy: ShardingStrategy) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(
        model,
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({small.Small}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name.replace("_fsdp_wrapped_module.", ""): p.grad.double().clone()
        for name, p in model.named_parameters()
        if p.requires_grad and p.grad is not None
    }


@functools.cache
def wanted(step: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
    """In float64, not sharded: the mean over the ranks."""
    peft = policy().double()
    model = Margin(peft) if step is within else peft
    for rank in range(2):
        (step(model, peft, words(rank)) / 2).backward()
    return gradients(model)


def flags(peft: PeftModel) -> dict[str, bool]:
    return {name.replace("_fsdp_wrapped_module.", ""): flag for name, flag in small.flags(peft).items()}


def one(step: Callable[..., torch.Tensor], strategy: ShardingStrategy) -> dict[str, Any]:
    """A step's gradients compared with those, and the parameters that it has switched."""
    peft = policy()
    before = flags(peft)
    model = sharded(Margin(peft) if step is within else peft, strategy)
    try:
        step(model, peft, words(torch.distributed.get_rank())).backward()
    except RuntimeError:
        return {"raised": traceback.format_exc()}
    after = flags(peft)
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        found = gradients(model)
    right = wanted(step)
    largest = max(float(gradient.abs().max()) for gradient in right.values())
    return {
        "switched": [name for name in before if after[name] != before[name]],
        "the same parameters": found.keys() == right.keys(),
        "off by": max(float((found[name] - right[name]).abs().max()) for name in right if name in found) / largest,
    }


def left_late() -> dict[str, Any]:
    """The switched parameters if the context begins before a gather, and ends after a forward pass that keeps it."""
    peft = policy()
    before = flags(peft)
    model = sharded(peft, ShardingStrategy.SHARD_GRAD_OP)
    try:
        with peft.disable_adapter():
            model(words(0))
    except RuntimeError:
        return {"raised": traceback.format_exc()}
    with torch.no_grad():
        model(words(0))  # afterwards the parameters are in their places again
    after = flags(peft)
    return {"switched": [name for name in before if after[name] != before[name]]}


def set_on_views() -> str:
    """Activates another adapter between the forward and the backward pass: the error."""
    peft = policy()
    model = sharded(peft, ShardingStrategy.SHARD_GRAD_OP)
    model(words(0))
    try:
        peft.base_model.set_adapter("other")
    except RuntimeError as error:
        return str(error)
    return "none"


def observe() -> dict[str, Any]:
    return {
        **{step.__name__: one(step, strategy) for step, strategy in STEPS.items()},
        "left late": left_late(),
        "set on views": set_on_views(),
    }


def main() -> None:
    torch.distributed.init_process_group("gloo")
    states.report(NAME, observe, states.parser().parse_args().out)
