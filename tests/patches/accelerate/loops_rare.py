"""Right training loops in plain torch that do something rarer."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from tests.patches.accelerate.loops_made import (
    model,
    plainly,
    right,
    rows,
)


@right
def sparse() -> Any:
    net = nn.Sequential(nn.EmbeddingBag(16, 8, sparse=True), nn.Linear(8, 3))
    optimizer = torch.optim.SparseAdam([net[0].weight])
    other = torch.optim.SGD(net[1].parameters(), lr=0.1)
    for x, y in rows():
        optimizer.zero_grad()
        other.zero_grad()
        cross_entropy(net((x.abs() * 4).long().clamp(max=15)), y).backward()
        optimizer.step()
        other.step()
    return net


@right
def recurrent() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.LSTM(2, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.cell(x.view(len(x), 4, 2))[0][:, -1])

    net = Net()
    return plainly(net, torch.optim.Adagrad(net.parameters()), lambda: nn.utils.clip_grad_norm_(net.parameters(), 0.25))


@right
def variational() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inward, self.outward = nn.Linear(8, 4), nn.Linear(2, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mean, spread = self.inward(x).chunk(2, 1)
            return self.outward(mean + torch.randn_like(mean) * spread.exp())

    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    for x, _ in rows():
        optimizer.zero_grad()
        mse_loss(net(x), x).backward()
        optimizer.step()
    return net


@right
def average_of_weights() -> Any:
    net = model()
    average = torch.optim.swa_utils.AveragedModel(net)
    optimizer = torch.optim.AdamW(net.parameters())
    for x, y in rows():
        optimizer.zero_grad()
        with torch.no_grad():
            target = average(x)
        (cross_entropy(net(x), y) + mse_loss(net(x), target)).backward()
        optimizer.step()
        average.update_parameters(net)
    return net


@right
def actor_and_critic() -> Any:
    actor, critic, temperature = nn.Linear(8, 3), nn.Linear(8, 1), nn.Parameter(torch.zeros(1))
    target = copy.deepcopy(critic).requires_grad_(False)
    optimizers = [torch.optim.Adam(each, lr=1e-2) for each in (actor.parameters(), critic.parameters(), [temperature])]
    for x, y in rows():
        log = torch.log_softmax(actor(x), 1)
        losses = (
            (log.gather(1, y[:, None]) * critic(x).detach()).mean(),
            mse_loss(critic(x), target(x) + 1),
            -(temperature.exp() * (log.detach().mean() + 1)).sum(),
        )
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return actor


@right
def sharpness_aware() -> Any:
    net = model(dropout=0.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x, y in rows():
        cross_entropy(net(x), y).backward()
        with torch.no_grad():
            moves = [0.05 * each.grad for each in net.parameters()]
            for each, move in zip(net.parameters(), moves, strict=True):
                each.add_(move)
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        with torch.no_grad():
            for each, move in zip(net.parameters(), moves, strict=True):
                each.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
    return net


@right
def surgery_of_two_tasks() -> Any:
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    for x, y in rows():
        of_tasks = []
        for loss in (cross_entropy(net(x), y), net(x).square().mean()):
            optimizer.zero_grad()
            loss.backward()
            of_tasks.append([each.grad.clone() for each in net.parameters()])
        for each, one, other in zip(net.parameters(), *of_tasks, strict=True):
            each.grad = torch.where(one * other > 0, one + other, one)
        optimizer.step()
    return net


@right
def with_noise() -> Any:
    net = model()

    def noise() -> None:
        for each in net.parameters():
            each.grad += 0.01 * torch.randn_like(each)

    return plainly(net, torch.optim.SGD(net.parameters(), lr=0.1), noise)


@right
def hooked_gradients() -> Any:
    net = model()
    net[0].weight.register_hook(lambda gradient: gradient * (torch.arange(8) > 3))
    return plainly(net, torch.optim.Adam(net.parameters()))


@right
def checkpointed() -> Any:
    from torch.utils.checkpoint import checkpoint

    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    for place, (x, y) in enumerate(rows()):
        optimizer.zero_grad()
        x.requires_grad_()
        made = checkpoint(net[:2], x, use_reentrant=place % 2 == 0)
        cross_entropy(net[2:](made), y).backward()
        optimizer.step()
    return net


@right
def compiled() -> Any:
    net = torch.compile(model(), backend="aot_eager")
    return plainly(net, torch.optim.AdamW(net.parameters()))


@right
def layers_at_random() -> Any:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    for place, (x, y) in enumerate(rows()):
        optimizer.zero_grad()
        made = net[1](net[0](x)) if place % 2 else net[0](x)
        cross_entropy(net[4](made), y).backward()
        optimizer.step()
    return net


@right
def two_groups_and_two_optimizers() -> Any:
    net = model()
    weights = [each for each in net.parameters() if each.dim() > 1]
    others = [each for each in net.parameters() if each.dim() == 1]
    one, other = torch.optim.SGD(weights, lr=0.1, weight_decay=0.1), torch.optim.AdamW(others)
    for x, y in rows():
        cross_entropy(net(x), y).backward()
        for each in (one, other):
            each.step()
            each.zero_grad()
    return net


@right
def thawed_after_a_step() -> Any:
    net = model()
    net[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(net.parameters())
    for place, (x, y) in enumerate(rows()):
        if place == 1:
            net[0].requires_grad_(True)
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()
    return net


@right
def language_model() -> Any:
    import transformers

    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": None, "eos_token_id": None}
    net = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=32, **sizes)).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for place in range(8):
        tokens = torch.randint(0, 32, (2, 6 + place))
        (net(input_ids=tokens, labels=tokens).loss / 2).backward()
        if place % 2:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return net


@right
def with_a_closure() -> Any:
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    for x, y in rows():

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(net(x), y)  # noqa: B023
            loss.backward()
            return loss

        optimizer.step(closure)
    return net
