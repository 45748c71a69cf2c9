"""Right training loops that published examples have: policies, adversaries, and what they do to gradients."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import cross_entropy

from tests.patches.accelerate.loops_made import model, plainly, right, rows


@right
def ppo() -> Any:
    pi = nn.Linear(4, 2)
    v = nn.Linear(4, 1)
    optimizer = torch.optim.Adam([*pi.parameters(), *v.parameters()], lr=3e-4, eps=1e-5)
    for _ in range(3):
        x = torch.randn(32, 4)
        with torch.no_grad():
            d = torch.distributions.Categorical(logits=pi(x))
            a = d.sample()
            old = d.log_prob(a)
            adv = torch.randn(32)
        for _ in range(3):
            for idx in torch.randperm(32).split(8):
                r = (torch.distributions.Categorical(logits=pi(x[idx])).log_prob(a[idx]) - old[idx]).exp()
                loss = (
                    -torch.min(r * adv[idx], r.clamp(0.8, 1.2) * adv[idx]).mean()
                    + 0.5 * (v(x[idx])[:, 0] - 1).pow(2).mean()
                )
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(pi.parameters(), 0.5)
                optimizer.step()
    return pi


@right
def momentum_encoder() -> Any:
    q = nn.Linear(8, 4)
    k = copy.deepcopy(q)
    for p in k.parameters():
        p.requires_grad = False
    optimizer = torch.optim.SGD(q.parameters(), 0.03, momentum=0.9, weight_decay=1e-4)
    for x, _ in rows():
        with torch.no_grad():
            for a, b in zip(q.parameters(), k.parameters(), strict=True):
                b.data = b.data * 0.999 + a.data * 0.001
            kk = k(x)
        loss = cross_entropy(q(x) @ kk.T / 0.07, torch.arange(len(x)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return q


@right
def gradients_set_to_none() -> Any:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    for x, y in rows():
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        for n, p in net.named_parameters():
            if n.startswith("4"):
                p.grad = None
        optimizer.step()
    return net


@right
def cyclegan() -> Any:
    a, b = nn.Linear(8, 8), nn.Linear(8, 8)
    da = nn.Linear(8, 1)
    og = torch.optim.Adam([*a.parameters(), *b.parameters()])
    od = torch.optim.Adam(da.parameters())
    for x, _ in rows():
        for p in da.parameters():
            p.requires_grad = False
        og.zero_grad()
        (F.mse_loss(b(a(x)), x) + da(a(x)).pow(2).mean()).backward()
        og.step()
        for p in da.parameters():
            p.requires_grad = True
        od.zero_grad()
        (da(x).pow(2).mean() * 0.5).backward()
        od.step()
    return a


@right
def passes_through_inner_steps() -> Any:
    net = nn.Linear(8, 3)
    optimizer = torch.optim.Adam(net.parameters())
    for x, y in rows():
        optimizer.zero_grad()
        for _ in range(2):
            w = dict(net.named_parameters())
            loss = cross_entropy(torch.func.functional_call(net, w, x), y)
            g = torch.autograd.grad(loss, list(w.values()), create_graph=True)
            w = {n: p - 0.1 * gg for (n, p), gg in zip(w.items(), g, strict=True)}
            cross_entropy(torch.func.functional_call(net, w, x), y).div(2).backward()
        optimizer.step()
    return net


@right
def weight_norm() -> Any:
    net = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(8, 16)),
        nn.Tanh(),
        nn.utils.parametrizations.spectral_norm(nn.Linear(16, 3)),
    )
    return plainly(net, torch.optim.AdamW(net.parameters()))


@right
def another_optimizer_after_a_step() -> Any:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for i, (x, y) in enumerate(rows()):
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()
        if i == 0:
            optimizer = torch.optim.Adam(net.parameters())
    return net


@right
def adversarial_inputs() -> Any:
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    for x, y in rows():
        x.requires_grad_()
        cross_entropy(net(x), y).backward()
        adv = (x + 0.1 * x.grad.sign()).detach()
        optimizer.zero_grad()
        cross_entropy(net(adv), y).backward()
        optimizer.step()
    return net


@right
def adversarial_inputs_in_several_passes() -> Any:
    net = model(dropout=0.0)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for x, y in rows():
        d = torch.zeros_like(x, requires_grad=True)
        for _ in range(3):
            cross_entropy(net(x + d), y).backward()
            d.data += 0.1 * d.grad.sign()
            d.grad = None
            optimizer.zero_grad()
        cross_entropy(net(x + d.detach()), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


@right
def a_group_is_added() -> Any:
    net = model()
    for p in net[0].parameters():
        p.requires_grad = False
    optimizer = torch.optim.Adam(filter(lambda p: p.requires_grad, net.parameters()))
    for i, (x, y) in enumerate(rows()):
        if i == 1:
            net[0].requires_grad_(True)
            optimizer.add_param_group({"params": net[0].parameters(), "lr": 1e-4})
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()
    return net


@right
def a_scale_that_overflows() -> Any:
    net = model(dropout=0.0)
    optimizer = torch.optim.AdamW(net.parameters())
    s = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    for x, y in rows(2):
        optimizer.zero_grad()
        s.scale(cross_entropy(net(x), y)).backward()
        s.step(optimizer)
        s.update()
    return net


@right
def stochastic_depth() -> Any:
    net = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
    h = nn.Linear(8, 3)
    optimizer = torch.optim.SGD([*net.parameters(), *h.parameters()], 0.1)
    for x, y in rows():
        for layer in net:
            if torch.rand(()) > 0.5:
                x = x + layer(x)
        optimizer.zero_grad()
        cross_entropy(h(x), y).backward()
        optimizer.step()
    return net


@right
def alternating_parts() -> Any:
    # zero_grad by set_to_none=False on all, params used alternately with weight decay
    net = nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)])
    optimizer = torch.optim.AdamW(net.parameters())
    for i, (x, y) in enumerate(rows()):
        optimizer.zero_grad(set_to_none=False)
        cross_entropy(net[i % 2](x), y).backward()
        optimizer.step()
    return net


@right
def adversarial_embeddings_in_several_passes() -> Any:
    net = nn.ModuleList([nn.Embedding(16, 8), nn.Linear(8, 3)])
    optimizer = torch.optim.Adam(net.parameters())

    def f(x: torch.Tensor) -> Any:
        return net[1](net[0](x).mean(1))

    for _ in range(4):
        x = torch.randint(0, 16, (4, 5))
        y = torch.randint(0, 3, (4,))
        optimizer.zero_grad()
        cross_entropy(f(x), y).backward()
        back = {n: p.grad.clone() for n, p in net.named_parameters()}
        emb = net[0].weight
        keep = emb.data.clone()
        for t in range(3):
            emb.data.add_(0.1 * emb.grad / emb.grad.norm())
            if t != 2:
                net.zero_grad()
            else:
                for n, p in net.named_parameters():
                    p.grad = back[n]
            cross_entropy(f(x), y).backward()
        emb.data = keep
        optimizer.step()
    return net


@right
def adversarial_embeddings() -> Any:
    net = nn.ModuleList([nn.Embedding(16, 8), nn.Linear(8, 3)])
    optimizer = torch.optim.Adam(net.parameters())

    def f(x: torch.Tensor) -> Any:
        return net[1](net[0](x).mean(1))

    for _ in range(4):
        x = torch.randint(0, 16, (4, 5))
        y = torch.randint(0, 3, (4,))
        optimizer.zero_grad()
        cross_entropy(f(x), y).backward()
        emb = net[0].weight
        keep = emb.data.clone()
        emb.data.add_(0.1 * emb.grad / emb.grad.norm())
        cross_entropy(f(x), y).backward()
        emb.data = keep
        optimizer.step()
    return net


@right
def passes_for_a_log() -> Any:
    net = model(dropout=0.0)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for x, y in rows():
        for loss in (cross_entropy(net(x), y), net(x).pow(2).mean()):
            optimizer.zero_grad()
            loss.backward()
        optimizer.zero_grad()
        (cross_entropy(net(x), y) + net(x).pow(2).mean()).backward()
        optimizer.step()
    return net


@right
def clipped_in_each_pass() -> Any:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for i, (x, y) in enumerate(rows()):
        (cross_entropy(net(x), y) / 2).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    return net


@right
def gradients_that_decay() -> Any:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for x, y in rows():
        cross_entropy(net(x), y).backward()
        optimizer.step()
        for p in net.parameters():
            p.grad *= 0.9
    return net


@right
def no_module() -> Any:
    w = torch.randn(8, 3, requires_grad=True)
    optimizer = torch.optim.SGD([w], 0.1)
    for x, y in rows():
        optimizer.zero_grad()
        cross_entropy(x @ w, y).backward()
        optimizer.step()
    return nn.ParameterList([w])


@right
def experts_without_tokens() -> Any:
    import transformers

    c = transformers.MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=1,
    )
    net = transformers.MixtralForCausalLM(c)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for _ in range(4):
        t = torch.randint(1, 32, (1, 3))
        net(input_ids=t, labels=t).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return net
