"""Right training loops in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.patches.accelerate.loops_made import (
    model,
    plainly,
    right,
    rows,
)

# -- right ones


@right
def plain_sgd() -> Any:
    net = model()
    return plainly(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))


@right
def clipped_and_scheduled() -> Any:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=10)

    def step() -> None:
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        if optimizer.state:
            schedule.step()

    return plainly(net, optimizer, step)


@right
def clipped_by_value() -> Any:
    net = model()
    return plainly(net, torch.optim.Adam(net.parameters()), lambda: nn.utils.clip_grad_value_(net.parameters(), 1e-3))


@right
def warmed_up_from_zero() -> Any:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
    return plainly(net, optimizer, lambda: schedule.step() if optimizer.state else None)


@right
def accumulated_by_hand() -> Any:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    for place, (x, y) in enumerate(rows()):
        (cross_entropy(net(x), y) / 4).backward()
        if place % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    return net


@right
def several_losses() -> Any:
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    for x, y in rows(16):
        optimizer.zero_grad(set_to_none=False)
        made = net(x)
        cross_entropy(made, y).backward(retain_graph=True)
        (0.1 * made.square().mean()).backward()
        optimizer.step()
    return net


@right
def gan() -> Any:
    maker, judge = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)), nn.Sequential(nn.Linear(8, 1))
    of_judge, of_maker = (torch.optim.Adam(each.parameters(), betas=(0.5, 0.999)) for each in (judge, maker))
    loss = nn.BCEWithLogitsLoss()
    for x, _ in rows():
        judge.zero_grad()
        loss(judge(x), torch.ones(len(x), 1)).backward()
        made = maker(torch.randn(len(x), 4))
        loss(judge(made.detach()), torch.zeros(len(x), 1)).backward()
        of_judge.step()
        maker.zero_grad()
        loss(judge(made), torch.ones(len(x), 1)).backward()
        of_maker.step()
    return maker


@right
def gan_with_penalty() -> Any:
    maker, judge = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    of_judge, of_maker = (torch.optim.RMSprop(each.parameters()) for each in (judge, maker))
    for x, _ in rows():
        for _ in range(2):
            of_judge.zero_grad()
            between = (x + maker(torch.randn(len(x), 4)).detach()).requires_grad_()
            (slope,) = torch.autograd.grad(judge(between).sum(), between, create_graph=True)
            (judge(x).mean() + (slope.norm(dim=1) - 1).square().mean()).backward()
            of_judge.step()
        of_maker.zero_grad()
        judge(maker(torch.randn(len(x), 4))).mean().backward()
        of_maker.step()
    return maker


@right
def frozen_layers() -> Any:
    net = model()
    net[0].requires_grad_(False)
    return plainly(net, torch.optim.AdamW(net.parameters()))


@right
def only_the_head() -> Any:
    net = model()
    return plainly(net, torch.optim.AdamW(net[4].parameters()))


@right
def replaced_head() -> Any:
    net = model()
    net[4] = nn.Linear(16, 3)
    return plainly(net, torch.optim.AdamW(net.parameters()))


@right
def batch_norm_kept_in_eval() -> Any:
    net = model(norm=True)
    net.train()
    net[1].eval()
    return plainly(net, torch.optim.SGD(net.parameters(), lr=0.1))


@right
def trained_in_evaluation_mode() -> Any:
    net = model(norm=True).eval()
    return plainly(net, torch.optim.SGD(net.parameters(), lr=0.1))


@right
def scaled() -> Any:
    net = model()
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    for x, y in rows():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return net


@right
def in_bfloat16() -> Any:
    net = model(dropout=0.0).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for place, (x, y) in enumerate(rows()):
        (cross_entropy(net(x.bfloat16()).float(), y) / 4).backward()
        if place % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    return net


@right
def lora_by_hand() -> Any:
    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 16, bias=False)
            nn.init.zeros_(self.up.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.up(self.down(x))

    net = model()
    net[0] = Adapted(net[0])
    return plainly(net, torch.optim.AdamW([each for each in net.parameters() if each.requires_grad], lr=1e-2))


@right
def with_peft() -> Any:
    import peft

    net = peft.get_peft_model(model(), peft.LoraConfig(target_modules=["0", "4"], r=2, lora_dropout=0.1))
    return plainly(net, torch.optim.AdamW(net.parameters(), lr=1e-2))


@right
def tied() -> Any:
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inward, self.outward = nn.Embedding(3, 8), nn.Linear(8, 3, bias=False)
            self.outward.weight = self.inward.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.outward(self.inward((x[:, 0] > 0).long()))

    net = Language()
    return plainly(net, torch.optim.AdamW(net.parameters()))
