"""Wrong training loops, and those that cannot be followed."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from tests.patches.accelerate.loops_made import (
    model,
    not_followed,
    plainly,
    rows,
    wrong,
    wrong_on_ranks,
)

# -- wrong ones


@wrong("gradient used", "begins with the gradient of the step before")
def never_cleared() -> Any:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x, y in rows():
        cross_entropy(net(x), y).backward()
        optimizer.step()
    return net


@wrong("gradient used", "backward passes were cleared before the step")
def cleared_in_each_micro_batch() -> Any:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for place, (x, y) in enumerate(rows()):
        optimizer.zero_grad()
        (cross_entropy(net(x), y) / 4).backward()
        if place % 4 == 3:
            optimizer.step()
    return net


@wrong("gradient used", "cleared between the last backward pass and the step")
def cleared_before_the_step() -> Any:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x, y in rows():
        cross_entropy(net(x), y).backward()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
    return net


@wrong("optimizer parameters", "that no model in use has")
def head_replaced_after_the_optimizer() -> Any:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net[4] = nn.Linear(16, 3)
    return plainly(net, optimizer)


@wrong("gradient used", "no parameter of the optimizer got a gradient")
def optimizer_of_another_copy() -> Any:
    net = model()
    optimizer = torch.optim.SGD(copy.deepcopy(net).parameters(), lr=0.1)
    return plainly(net, optimizer)


@wrong("optimizer step", "that are frozen moved at the step")
def frozen_with_a_gradient() -> Any:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for place, (x, y) in enumerate(rows()):
        cross_entropy(net(x), y).backward()
        optimizer.step()
        if place == 0:
            optimizer.zero_grad(set_to_none=False)
            net[0].requires_grad_(False)
        else:
            optimizer.zero_grad(set_to_none=False)
    return net


@wrong("tied parameters", "were one parameter")
def untied_by_a_copy() -> Any:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3))
    net[1].weight = net[0].weight
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x, y in rows():
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()
        net[1].weight = nn.Parameter(net[1].weight.detach().clone())
    return net


@wrong("gradient accumulation", "accumulate() is not used")
def accelerate_divides_and_every_batch_steps() -> Any:
    import accelerate

    accelerator = accelerate.Accelerator(gradient_accumulation_steps=4, cpu=True)
    net = model()
    net, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), rows(2))
    for x, y in loader:
        accelerator.backward(cross_entropy(net(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return net


@wrong("gradient used", "backward passes were cleared before the step")
def accelerate_with_the_models_own_zero_grad() -> Any:
    import accelerate

    accelerator = accelerate.Accelerator(gradient_accumulation_steps=4, cpu=True)
    net = model()
    net, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), rows(2))
    for x, y in loader:
        with accelerator.accumulate(net):
            net.zero_grad()
            accelerator.backward(cross_entropy(net(x), y))
            optimizer.step()
    return net


@wrong_on_ranks("gradient used", "DistributedDataParallel did not reduce them")
def ddp_bypassed() -> Any:
    net = model()
    wrapped = DistributedDataParallel(net)
    return plainly(wrapped.module, torch.optim.SGD(wrapped.parameters(), lr=0.1))


@wrong_on_ranks("gradient used", "DistributedDataParallel did not reduce them")
def ddp_that_never_reduces() -> Any:
    net = model()
    wrapped = DistributedDataParallel(net)
    with wrapped.no_sync():
        return plainly(wrapped, torch.optim.SGD(net.parameters(), lr=0.1))


@wrong_on_ranks("gradient across ranks", "ranks with the same parameters use different gradients")
def clipped_on_one_rank() -> Any:
    net = model()
    wrapped = DistributedDataParallel(net)

    def clip() -> None:
        if distributed.get_rank() == 1:
            nn.utils.clip_grad_norm_(net.parameters(), 0.01)

    return plainly(wrapped, torch.optim.SGD(net.parameters(), lr=0.1), clip)


# -- not followed


@not_followed("calls its closure several times")
def lbfgs() -> Any:
    net = model(dropout=0.0)
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=4)
    for x, y in rows():

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(net(x), y)  # noqa: B023
            loss.backward()
            return loss

        optimizer.step(closure)
    return net


@not_followed("no backward pass made the gradient of")
def master_copies() -> Any:
    net = model().to(torch.bfloat16)
    masters = [nn.Parameter(each.detach().float().clone()) for each in net.parameters()]
    optimizer = torch.optim.AdamW(masters)
    for x, y in rows():
        net.zero_grad()
        cross_entropy(net(x.bfloat16()).float(), y).backward()
        for each, master in zip(net.parameters(), masters, strict=True):
            master.grad = each.grad.float()
        optimizer.step()
        with torch.no_grad():
            for each, master in zip(net.parameters(), masters, strict=True):
                each.copy_(master)
    return net


@not_followed("steps within the backward pass")
def optimizers_in_the_backward_pass() -> Any:
    net = model()
    optimizers = {each: torch.optim.SGD([each], lr=0.1) for each in net.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for each in net.parameters():
        each.register_post_accumulate_grad_hook(step)
    for x, y in rows():
        cross_entropy(net(x), y).backward()
    return net


@not_followed("accelerate.local_sgd is imported", ranks=2)
def local_sgd() -> Any:
    import accelerate
    from accelerate.local_sgd import LocalSGD

    accelerator = accelerate.Accelerator(cpu=True)
    net, optimizer, loader = accelerator.prepare(net := model(), torch.optim.SGD(net.parameters(), lr=0.1), rows())
    with LocalSGD(accelerator=accelerator, model=net, local_sgd_steps=8) as averages:
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(cross_entropy(net(x), y))
            optimizer.step()
            averages.step()
    return net


@not_followed("the parameters are sharded (DTensor)", ranks=2)
def fully_sharded() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = model()
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    return plainly(net, torch.optim.AdamW(net.parameters()))


@not_followed("the parameters are sharded (DTensor)", ranks=2)
def tensor_parallel() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(net, init_device_mesh("cpu", (2,)), plan)
    return plainly(net, torch.optim.AdamW(net.parameters()))


@not_followed("no backward pass made the gradient of", ranks=2)
def zero_of_deepspeed() -> Any:
    from rlhf_patches.patches.deepspeed.proofs import on_cpu

    on_cpu.start()
    import deepspeed

    net = model(dropout=0.0)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(net.parameters()), config=config)
    for x, y in rows():
        engine.backward(cross_entropy(engine(x.bfloat16()).float(), y))
        engine.step()
    return net
