"""DeepSpeed's mixture of experts with more than two experts per token: ``--out FOLDER``, on one rank.

The layer with its gate and its experts is real, forward and backward. The reference is float64, from the definition: a
token chooses the k experts with its largest logits, an expert takes at most its capacity of the tokens that chose it,
and a token's experts are weighted by the softmax over all experts, normalized over the experts that took it.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch

from rlhf_patches.patches.deepspeed.proofs import on_cpu
from rlhf_patches.proving import states

NAME = "deepspeed-topk-drops"
TOKENS, WIDTH, EXPERTS = 59, 12, 8
# `shift` is added to every logit, which changes no softmax and no choice.
CASES: dict[str, dict[str, Any]] = {
    "around zero": {"shift": 0.0},
    "negative": {"shift": -4.0},
    "three": {"shift": -1.0, "k": 3},
    "room": {"shift": -4.0, "factor": 2.0, "k": 3},
    "evaluation": {"shift": -4.0, "training": False},
    "positive": {"shift": 6.0},
    "two": {"shift": -4.0, "k": 2},
    "nothing dropped": {"shift": -4.0, "drop_tokens": False},
}


def layer(k: int, factor: float, shift: float, drop_tokens: bool) -> Any:
    torch.manual_seed(3)
    found = importlib.import_module("deepspeed.moe.layer").MoE(
        WIDTH,
        torch.nn.Linear(WIDTH, WIDTH),
        num_experts=EXPERTS,
        k=k,
        capacity_factor=factor,
        eval_capacity_factor=factor,
        drop_tokens=drop_tokens,
        top2_2nd_expert_sampling=False,
    )
    found.set_deepspeed_parallelism()
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.copy_(torch.randn(parameter.shape))
        found.deepspeed_moe.gate.wg.weight[:, 0] = shift  # the first feature of each token is 1
    return found


def tokens() -> torch.Tensor:
    found = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(9))
    found[:, 0] = 1
    return found


def reference(moe: Any, k: int, factor: float, drop_tokens: bool) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Outputs, the gradient of the router's weights, and the number of kept choices."""
    router = moe.deepspeed_moe.gate.wg.weight.detach().double().requires_grad_()
    experts = [
        [each.weight.detach().double(), each.bias.detach().double()]
        for each in moe.deepspeed_moe.experts.deepspeed_experts
    ]
    inputs = tokens().double()
    logits = inputs @ router.T
    chosen = [set(row.argsort(descending=True)[:k].tolist()) for row in logits.detach()]
    capacity = max(math.ceil(TOKENS / EXPERTS * factor * k), 4) if drop_tokens else TOKENS
    taken: list[set[int]] = [set() for _ in range(TOKENS)]
    for expert in range(EXPERTS):
        own = [token for token in range(TOKENS) if expert in chosen[token]]
        for token in sorted(own, key=lambda token: -logits[token, expert].item())[:capacity]:
            taken[token].add(expert)
    outputs = []
    for token in range(TOKENS):
        weights = {expert: logits[token].softmax(-1)[expert] for expert in taken[token]}
        total = sum(weights.values()) if weights else 1.0
        output = torch.zeros(WIDTH, dtype=torch.float64)
        for expert, weight in weights.items():
            matrix, bias = experts[expert]
            output = output + weight / total * (matrix @ inputs[token] + bias)
        outputs.append(output)
    found = torch.stack(outputs)
    found.square().sum().backward()
    assert router.grad is not None
    return found.detach(), router.grad, sum(map(len, taken))


def kept(found: Any) -> int:
    """The number of choices that the gate keeps."""
    if len(found) == 4:
        return int(found[2].sum())
    return sum(int((each >= 0).sum()) for each in found[3])  # newer releases: -1 is a dropped choice


def step(
    *, shift: float, k: int = 4, factor: float = 1.0, drop_tokens: bool = True, training: bool = True
) -> dict[str, Any]:
    moe = layer(k, factor, shift, drop_tokens).train(training)
    gates = []
    gate = moe.deepspeed_moe.gate
    gate.register_forward_hook(lambda module, args, found: gates.append(found))
    output, *_ = moe(tokens())
    output.square().sum().backward()
    exact, gradient, right = reference(moe, k, factor, drop_tokens)
    router = gate.wg.weight.grad
    return {
        "off": ((output.double() - exact).norm() / exact.norm()).item(),
        "gradient off": ((router.double() - gradient).norm() / gradient.norm()).item(),
        "kept": kept(gates[0]),
        "to keep": right,
        "output": output.flatten().tolist(),
        "gradient": router.flatten().tolist(),
    }


def positions() -> list[float]:
    """The function's result with the other policy."""
    topkgating = importlib.import_module("deepspeed.moe.sharded_moe").topkgating
    logits = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(1)) - 2
    _, weights, *_ = topkgating(logits, 4, 1.0, 4, drop_policy="position")
    found: list[float] = weights.flatten().tolist()
    return found


def zeros() -> dict[str, Any]:
    """The number of kept choices for tokens of zeros among others with logits above 0, with room for all."""
    topkgating = importlib.import_module("deepspeed.moe.sharded_moe").topkgating
    logits = torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(1)) + 0.1
    logits[TOKENS // 2 :] = 0
    _, weights, *_ = topkgating(logits, 3, 2.0, 4)
    return {"kept": int((weights > 0).sum()), "to keep": 3 * TOKENS}


def observe() -> dict[str, Any]:
    found: dict[str, Any] = {"positions": positions(), "zeros": zeros()}
    for case, settings in CASES.items():
        try:
            found[case] = step(**settings)
        except UnboundLocalError as error:  # 0.15 without dropping raises, as released
            found[case] = {"off": 0.0, "gradient off": 0.0, "error": str(error)}
    return found


def main() -> None:
    options = states.parser().parse_args()
    on_cpu.start()
    if hasattr(torch.compiler, "set_stance"):  # releases compile a function of one line, which takes most of the time
        torch.compiler.set_stance("force_eager")
    states.report(NAME, observe, options.out)
