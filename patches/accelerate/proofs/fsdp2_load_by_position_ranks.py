"""QLoRA under FSDP2 with efficient loading, through accelerate, on each of two ranks: ``--out FOLDER [CASE ...]``.

Each case before apply() of accelerate-fsdp2-load-by-position, after it, and after revert(); beside it the same steps
in float64, with the weights that bitsandbytes' own dequantization gives.
"""

from __future__ import annotations

import datetime
import itertools
import os
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import bitsandbytes
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState

import rlhf_patches
from rlhf_patches.patches.accelerate.proofs import fsdp2_on_cpu
from rlhf_patches.proving import states

NAME = "accelerate-fsdp2-load-by-position"
RANK, STEPS, RATE = int(os.environ["RANK"]), 3, 1e-3
CASES: dict[str, dict[str, Any]] = {
    "QLoRA, on meta elsewhere": {"storage": torch.float32, "meta": True},
    "QLoRA in bytes": {"storage": torch.uint8},
    "LoRA": {},
}


class Model(torch.nn.Module):
    """A frozen layer, in four bits or not, and an adapter beside it."""

    def __init__(self, rank: int, storage: torch.dtype | None = None, meta: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)  # each rank quantizes the same weights
        if storage is None:
            self.base: Any = torch.nn.Linear(64, 32, bias=False).requires_grad_(False)
        else:
            self.base = bitsandbytes.nn.Linear4bit(
                64, 32, bias=False, compute_dtype=torch.float32, quant_type="nf4", quant_storage=storage
            ).to("cpu")
        if meta and rank:  # as transformers leaves it
            weight = self.base.weight
            self.base.weight = type(weight)(weight.data.to("meta"), **weight.__dict__)
        torch.manual_seed(rank)  # what rank 0 has counts
        self.a, self.b = torch.nn.Linear(64, 4, bias=False), torch.nn.Linear(4, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x) + self.b(self.a(x))
        return y


def batches() -> torch.Tensor:
    """Inputs by step and rank."""
    return torch.randn(STEPS, 2, 4, 64, generator=torch.Generator().manual_seed(5))


def exactly(case: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank 0's adapter, and after the same steps: the mean over the ranks, plain SGD, float64."""
    model = Model(0, **case)
    weight = model.base.weight
    if case:
        weight = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
    base, *adapter = (one.detach().double() for one in (weight, model.a.weight, model.b.weight))
    start = flat(adapter)
    for batch in batches().double():
        a, b = (one.requires_grad_() for one in adapter)
        loss = torch.stack([(x @ base.T + x @ a.T @ b.T).pow(2).sum() for x in batch]).mean()
        slopes = torch.autograd.grad(loss, (a, b))
        adapter = [(one - RATE * slope).detach() for one, slope in zip((a, b), slopes, strict=True)]
    return start, flat(adapter)


def flat(parameters: Iterable[Any]) -> torch.Tensor:
    """All of them, whole, in float64."""
    whole = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in parameters]
    return torch.cat([one.detach().double().flatten() for one in whole])


def trained(case: dict[str, Any]) -> dict[str, Any]:
    """What is wrong of the adapter's start and of its way."""
    model: Any = Model(RANK, **case)
    optimizer = torch.optim.SGD([model.a.weight, model.b.weight], lr=RATE)
    model, optimizer = fsdp2_on_cpu.prepare(Accelerator(cpu=True), model, optimizer, "no", efficient=True)
    adapter = [model.a.weight, model.b.weight]
    start, right = exactly(case)
    found = {"start": float((flat(adapter) - start).norm())}
    for batch in batches():
        model(batch[RANK]).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found["error"] = float((flat(adapter) - right).norm() / (right - start).norm())
    return {**found, "bits": float(flat(adapter).norm()).hex(), "raised": None}


def in_a_new_group(case: dict[str, Any], store: Path) -> dict[str, Any]:
    """The same, or what was raised: in a process group of its own, because a failure ends it.

    Where ranks will wait for what does not come, they wait 3 seconds.
    """
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=RANK, world_size=2)
    AcceleratorState._reset_state(reset_partial_state=True)
    dist.barrier()
    if case and not rlhf_patches.in_force(NAME):
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=3), dist.group.WORLD)
    try:
        return trained(case)
    except (AttributeError, RuntimeError) as error:
        return {"raised": f"{type(error).__name__}: {error}", "log": traceback.format_exc()}
    finally:
        dist.destroy_process_group()


def main() -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="*", metavar="CASE", default=list(CASES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    stores = (options.out / f"store{number}" for number in itertools.count())
    states.report(
        NAME, lambda: {name: in_a_new_group(CASES[name], next(stores)) for name in options.cases}, options.out
    )
