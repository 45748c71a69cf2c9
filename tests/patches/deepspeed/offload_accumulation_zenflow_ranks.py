"""What ZenFlow's optimizer on the CPU gets of several micro-batches: ``--out FOLDER``, on two ranks.

Before apply() of deepspeed-offload-accumulation, after it, and after revert(). Learning rates of 0 keep the parameters
where they are, so every step's gradient has a definition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rlhf_patches.patches.deepspeed.proofs import on_cpu, steps
from rlhf_patches.proving import states

FOUR, NOT_IN_THE_FIRST = steps.Case(), steps.Case(rare=(1, 2, 3))


@dataclass(frozen=True)
class OnCPU:
    """In place of ZenFlow's Adam on the CPU, which would have to be compiled: of `overlap_step`, the process's pipe."""

    def send(self, _: Any) -> None:
        pass

    def recv(self) -> dict[str, str]:
        return {"type": "done"}


class Adam(torch.optim.AdamW):
    """With the argument of ZenFlow's."""

    def step(self, closure: Any = None, step_id: int | None = None) -> Any:
        return super().step(closure)


def norms(case: steps.Case, rank: int, overlapped: bool) -> list[float]:
    """Of each step's gradient."""
    model = steps.fresh(case)
    engine = on_cpu.engine(
        model,
        {
            "stage": case.stage,
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
            "zenflow": {
                "topk_ratio": 0.1,
                "select_strategy": "step",
                "select_interval": case.micro_batches,
                "update_interval": case.micro_batches,
                "overlap_step": overlapped,
            },
        },
        Adam(model.parameters(), lr=0.0, weight_decay=0.0),
        optimizer={"type": "Adam", "params": {"lr": 0.0}},
    )
    if overlapped:
        optimizer = engine.optimizer
        optimizer.parent_conn, optimizer.process_optimizer_established = OnCPU(), True
        for group in optimizer.optimizer.param_groups:
            group["bias_correction"] = True
            for parameter in group["params"]:
                parameter.stale_param = parameter.detach().clone()
    found = []
    for step, (xs, ys) in enumerate(zip(*steps.data(case), strict=True)):
        for number, (x, y) in enumerate(zip(xs[:, rank], ys[:, rank], strict=True)):
            engine.backward(steps.loss_of(case, step, number, engine, x, y))
            engine.step()
        found.append(float(engine.get_global_grad_norm()))
    engine.destroy()
    return found


def exactly(case: steps.Case) -> list[float]:
    """By the definition: the mean over micro-batches and ranks, in float64."""
    model, found = steps.fresh(case).double(), []
    for step, (xs, ys) in enumerate(zip(*(tensor.double() for tensor in steps.data(case)), strict=True)):
        losses = [
            steps.loss_of(case, step, number, model, x, y)
            for number, ranks in enumerate(zip(xs, ys, strict=True))
            for x, y in zip(*ranks, strict=True)
        ]
        gradients = torch.autograd.grad(torch.stack(losses).mean(), list(model.parameters()))
        found.append(float(torch.cat([gradient.flatten() for gradient in gradients]).norm()))
    return found


def main() -> None:
    options = states.parser().parse_args()
    rank = on_cpu.start()
    cases: dict[str, tuple[steps.Case, bool]] = {
        "ZeRO-2": (FOUR, False),
        "ZeRO-1": (steps.Case(stage=1), False),
        "of two": (steps.Case(micro_batches=2), False),
        "overlapped": (FOUR, True),
        "overlapped, not in the first": (NOT_IN_THE_FIRST, True),
    }
    states.report(
        "deepspeed-offload-accumulation",
        lambda: {
            name: {"norms": norms(case, rank, overlapped), "right norms": exactly(case)}
            for name, (case, overlapped) in cases.items()
        },
        options.out,
    )
