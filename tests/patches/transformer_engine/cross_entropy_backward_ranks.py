"""TransformerEngine's fused cross-entropy, its own kernels interpreted: ``--out FOLDER``, one rank or more.

Levels: `tests.harness.forkserver.transformer_engine`. Each case runs without the patch, with it, and after a revert.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import rlhf_patches
from rlhf_patches.proving import states

PATCH = "transformer-engine-cross-entropy-backward"
SEQUENCE, BATCH, VOCABULARY = 5, 2, 38
IGNORED = -100
READS = ("_local_scalar_dense", "equal", "is_nonzero", "item")

Weighted = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def weighted(loss: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (loss * weights).sum() / weights.sum()


def as_megatron(loss: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`LanguageModule.compute_language_model_loss` gives ``[B, S]``, of which the loss mask selects."""
    return weighted(loss.transpose(0, 1).contiguous().float(), weights.t().contiguous())


def of_the_mean(loss: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return loss * weights.mean()


CASES: dict[str, dict[str, Any]] = {
    # As a prompt's tokens are: the first of each sequence has no weight.
    "masked": {},
    "masked, [B, S]": {"tokens": (BATCH, SEQUENCE)},
    "masked, one sequence": {"tokens": (SEQUENCE, 1)},
    "masked, float16": {"dtype": torch.float16},
    "megatron": {"total": as_megatron},
    "plain sum": {"total": lambda loss, weights: loss.sum()},
    "smoothing": {"smoothing": 0.1},
    "ignored": {"ignored": True},
    "mean": {"total": of_the_mean, "reduce": True},
    "mean alone": {"total": lambda loss, weights: loss.sum(), "reduce": True},
    "mean, ignored": {"total": of_the_mean, "reduce": True, "ignored": True},
}


def run(case: dict[str, Any], group: Any) -> dict[str, Any]:
    """One case on this rank's part of the vocabulary, against float64 on the whole of it."""
    from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

    torch.manual_seed(0)
    tokens = case.get("tokens", (SEQUENCE, BATCH))
    values = torch.randn(*tokens, VOCABULARY).to(case.get("dtype", torch.float32))
    target, weights = torch.randint(0, VOCABULARY, tokens), torch.rand(tokens)
    weights[(slice(None), 0) if tokens == (BATCH, SEQUENCE) else 0] = 0.0
    if case.get("ignored"):
        target.view(-1)[1::3] = IGNORED
    total: Weighted = case.get("total", weighted)
    reduce, smoothing = case.get("reduce", False), case.get("smoothing", 0.0)

    rank, ranks = (group.rank(), group.size()) if group else (0, 1)
    part = slice(rank * VOCABULARY // ranks, (rank + 1) * VOCABULARY // ranks)
    mine = values[..., part].clone().requires_grad_()
    loss = parallel_cross_entropy(mine * 1.0, target, smoothing, reduce, group)
    # The released kernel reads on behind the one number that a sum expands to all tokens: what is there is made known.
    one, *_ = torch.tensor([1.0, *[7.0] * loss.numel()])
    total(loss, weights).backward(one)
    assert mine.grad is not None

    exact = values.double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(
        exact.view(-1, VOCABULARY),
        target.view(-1),
        ignore_index=IGNORED,
        label_smoothing=smoothing,
        reduction="mean" if reduce else "none",
    )
    wanted = losses if reduce else losses.view(tokens)
    total(wanted, weights.double()).backward()
    assert exact.grad is not None
    gradient = exact.grad[..., part]
    return {
        "loss": (loss.detach().double() - wanted.detach()).abs().max().item(),
        "ratio of losses": (loss.detach().double().sum() / wanted.detach().sum()).item(),
        "norm": mine.grad.double().norm().item(),
        "exact norm": gradient.norm().item(),
        "gradient": ((mine.grad.double() - gradient).norm() / gradient.norm()).item(),
        "bits": mine.grad.view(torch.uint8).sum(dtype=torch.int64).item(),
    }


class _NoReads(TorchDispatchMode):
    """Refuses what reads a tensor on the host, which fails while a CUDA graph is captured; notes products' dtypes.

    A CPU computes a product with a tensor of no dimension in its dtype anyway, a GPU in the one that torch promotes to.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function._schema.name.removeprefix("aten::") in READS:
            raise RuntimeError(f"{function} reads a tensor on the host")
        if function is torch.ops.aten.mul_.Tensor:
            self.dtypes.add(torch.result_type(*args))
        return function(*args, **(kwargs or {}))


def captured() -> dict[str, Any]:
    """Backward as under CUDA graphs: what it reads on the host, and bfloat16 gradients, for each kind of gradient."""
    kernels = importlib.import_module("transformer_engine.pytorch.triton.cross_entropy")
    found: dict[str, Any] = {}
    torch.manual_seed(1)
    for name, incoming in {
        "per token": torch.rand(BATCH, SEQUENCE).t(),
        "of a sum": torch.rand(()).expand(SEQUENCE, BATCH),
        "of a mean": torch.rand(()),
    }.items():
        gradient = torch.randn(SEQUENCE, BATCH, VOCABULARY).bfloat16()
        wanted = (gradient.double() * (incoming[..., None] if incoming.dim() else incoming).double()).bfloat16()
        version = gradient._version
        with _NoReads() as mode:
            result = kernels.cross_entropy_backward(gradient, incoming, True)
        same = torch.equal(result, wanted) and mode.dtypes == {torch.float32}
        found[name] = [same, result is gradient, gradient._version == version]
    return found


def without_tokens() -> list[int]:
    """The gradient's shape where a micro-batch has no token."""
    kernels = importlib.import_module("transformer_engine.pytorch.triton.cross_entropy")
    gradient = torch.empty(0, BATCH, VOCABULARY)
    return list(kernels.cross_entropy_backward(gradient, torch.empty(0, BATCH)).shape)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    group = None
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        torch.distributed.init_process_group("gloo")
        group = torch.distributed.group.WORLD
    kernels = importlib.import_module("transformer_engine.pytorch.triton.cross_entropy")
    knows_ignored = "ignore_idx" in inspect.signature(kernels.cross_entropy_forward).parameters
    cases = {
        name: case
        for name, case in CASES.items()
        if (knows_ignored or not case.get("ignored")) and (not options.names or name in options.names)
    }
    report: dict[str, Any] = {"version": importlib.metadata.version("transformer-engine")}
    report["before"] = {name: run(case, group) for name, case in cases.items()}
    report["without tokens"] = [without_tokens()]
    rlhf_patches.apply(only=PATCH)
    report["row"] = rlhf_patches.report()[PATCH].to_dict()
    report["after"], report["occurred"] = {}, {}
    for name, case in cases.items():
        before = states.counts(PATCH)
        report["after"][name] = run(case, group)
        report["occurred"][name] = [now - then for now, then in zip(states.counts(PATCH), before, strict=True)]
    report["without tokens"].append(without_tokens())
    if "is_cg_capturable" in inspect.signature(kernels.cross_entropy_backward).parameters:
        report["captured"] = captured() if report["row"]["status"] == "applied" else None
    rlhf_patches.revert()
    report["reverted"] = {name: run(cases[name], group) for name in ("masked", "mean") if name in cases}
    (options.out / f"rank{group.rank() if group else 0}.json").write_text(json.dumps(report))
