"""Right training loops of accelerate, and right ones on ranks."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from tests.patches.accelerate.loops_made import (
    model,
    on_ranks,
    plainly,
    right,
    rows,
)
from tests.patches.accelerate.loops_right import plain_sgd


def accelerated(net: nn.Module, number: int = 4, **settings: Any) -> Any:
    """A loop as accelerate's documentation has it."""
    import accelerate

    accelerator = accelerate.Accelerator(gradient_accumulation_steps=number, cpu=True, **settings)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    net, optimizer, loader, schedule = accelerator.prepare(net, optimizer, rows(2), schedule)
    for x, y in loader:
        with accelerator.accumulate(net):
            accelerator.backward(cross_entropy(net(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return accelerator.unwrap_model(net)


@right
@on_ranks
def accelerate_loop() -> Any:
    return accelerated(model())


@right
@on_ranks
def accelerate_in_bfloat16() -> Any:
    return accelerated(model(), mixed_precision="bf16")


@right
def accelerate_without_accumulation() -> Any:
    return accelerated(model(norm=True), 1)


@right
def accelerate_with_windows_by_hand() -> Any:
    import accelerate

    accelerator = accelerate.Accelerator(gradient_accumulation_steps=4, cpu=True)
    net = model()
    net, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), rows(2))
    for place, (x, y) in enumerate(loader):
        accelerator.backward(cross_entropy(net(x), y))
        if place % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    return net


@right
@on_ranks
def accelerate_with_a_short_window() -> Any:
    import accelerate

    accelerator = accelerate.Accelerator(gradient_accumulation_steps=4, cpu=True)
    net = model()
    net, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), rows(2, 12))
    for _ in range(4):
        for x, y in loader:
            with accelerator.accumulate(net):
                accelerator.backward(cross_entropy(net(x), y))
                optimizer.step()
                optimizer.zero_grad()
    return net


# -- right ones on ranks


def averaged(net: nn.Module, number: int = 1, **settings: Any) -> Any:
    """DistributedDataParallel by hand."""
    wrapped = DistributedDataParallel(net, **settings)
    optimizer = torch.optim.AdamW(net.parameters())
    for place, (x, y) in enumerate(rows()):
        last = place % number == number - 1
        with contextlib.nullcontext() if last else wrapped.no_sync():
            (cross_entropy(wrapped(x), y) / number).backward()
        if last:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return net


@on_ranks
def ddp_by_hand() -> Any:
    return averaged(model())


@on_ranks
def ddp_that_accumulates() -> Any:
    return averaged(model(), 4)


@on_ranks
def ddp_with_views() -> Any:
    return averaged(model(), 2, gradient_as_bucket_view=True)


@on_ranks
def ddp_with_a_static_graph() -> Any:
    return averaged(model(), static_graph=True)


@on_ranks
def ddp_with_unused_parameters() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts[distributed.get_rank()](x)

    return averaged(Net(), find_unused_parameters=True)


@on_ranks
def reduced_by_hand() -> Any:
    net = model()
    for each in net.parameters():
        distributed.broadcast(each.data, 0)

    def reduce() -> None:
        for each in net.parameters():
            distributed.all_reduce(each.grad)
            each.grad /= distributed.get_world_size()

    return plainly(net, torch.optim.SGD(net.parameters(), lr=0.1), reduce)


@on_ranks
def each_rank_its_own_model() -> Any:
    return plain_sgd()


@on_ranks
def other_seeds_on_ranks() -> Any:
    torch.manual_seed(distributed.get_rank())
    return plain_sgd()


@on_ranks
def cut_layers() -> Any:
    """Tensor parallelism by hand: each rank has a half of the hidden units, and norms of its own half."""

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
            value = value.clone()
            distributed.all_reduce(value)
            return value

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient

    torch.manual_seed(distributed.get_rank())
    inward, outward = nn.Linear(8, 8), nn.Linear(8, 3, bias=False)
    optimizer = torch.optim.SGD([*inward.parameters(), *outward.parameters()], lr=0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        x, y = torch.randn(4, 8, generator=generator), torch.randint(0, 3, (4,), generator=generator)
        optimizer.zero_grad()
        cross_entropy(Sum.apply(outward(inward(x).relu())), y).backward()
        optimizer.step()
    return inward
