"""Learning rates with DeepSpeed and an empty parameter group: ``--out FOLDER [CASE ...]``, on one rank.

Runs each case before apply() of deepspeed-empty-groups, after it, and after revert(). The reference is the same
optimizer and scheduler without DeepSpeed.
"""

from __future__ import annotations

import copy
import re
import traceback
from typing import Any

import torch
from deepspeed import zero
from deepspeed.runtime import lr_schedules
from torch.optim import lr_scheduler

from rlhf_patches.patches.deepspeed.proofs import on_cpu
from rlhf_patches.proving import states

NAME = "deepspeed-empty-groups"
RATES, FACTORS, STEPS = (0.1, 0.004, 0.03), (1.0, 2.0, 3.0), 4
SCHEDULERS: dict[str, Any] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, [0.2, 0.3, 0.4], total_steps=9, cycle_momentum=False
    ),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.5)], milestones=[2]
    ),
    "deepspeed": lambda optimizer: lr_schedules.WarmupLR(optimizer, 0.001, list(RATES), 4, "linear"),
}
JOINED: dict[str, Any] = {
    "chained": lambda _, pair: lr_scheduler.ChainedScheduler(pair),
    "chained for": lambda optimizer, pair: lr_scheduler.ChainedScheduler(pair, optimizer),
    "in sequence": lambda optimizer, pair: lr_scheduler.SequentialLR(optimizer, pair, milestones=[9]),
    "another for theirs": lambda _, pair: lr_scheduler.StepLR(pair[0].optimizer, 2),
}
"""Schedulers made from two others, for the same optimizer."""
CASES: dict[str, dict[str, Any]] = {
    "last": {"empty": 2},
    "in between": {"empty": 1, "stage": 2},
    "first": {"empty": 0, "stage": 1},
    "partitioned": {"empty": 1, "stage": 3},
    "passed": {"empty": 1, "passed": True},
    "one cycle": {"empty": 1, "kind": "one cycle"},
    "sequence": {"empty": 1, "kind": "sequence"},
    "resumed": {"empty": 1, "resumed": True},
    "DeepSpeed's own, passed": {"empty": 1, "kind": "deepspeed", "passed": True},
    "called": {"empty": 1, "called": True},
    "none empty": {"empty": None},
    "added later": {"empty": None, "added": True},
    **{f"joined: {how}": {"empty": 1, "joined": how} for how in JOINED},
}


def pair(optimizer: torch.optim.Optimizer) -> list[lr_scheduler.LRScheduler]:
    """Two schedulers to join."""
    return [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.5)]


class Model(torch.nn.Module):
    """Weights whose gradients are the factors. The weight of the empty group is not trained."""

    def __init__(self, empty: int | None) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.full((4,), 2.0) for _ in RATES)
        for index, weight in enumerate(self.weights):
            weight.requires_grad_(index != empty)

    def forward(self, factors: torch.Tensor) -> torch.Tensor:
        return torch.stack([(w * f).sum() for w, f in zip(self.weights, factors, strict=True)]).sum()


def made(case: dict[str, Any]) -> tuple[Model, torch.optim.Optimizer, Any]:
    """A model, its optimizer and the function that makes the scheduler."""
    model = Model(case["empty"])
    groups = [
        {"params": [weight] if weight.requires_grad else [], "lr": rate}
        for weight, rate in zip(model.weights, RATES, strict=True)
    ]
    return model, torch.optim.SGD(groups, lr=1.0), pair if "joined" in case else SCHEDULERS[case.get("kind", "lambda")]


def joined(case: dict[str, Any], optimizer: torch.optim.Optimizer, scheduler: Any) -> Any:
    """The scheduler, or the one that is made from a pair."""
    return JOINED[case["joined"]](optimizer, scheduler) if "joined" in case else scheduler


def without_deepspeed(case: dict[str, Any]) -> tuple[list[list[float]], list[dict[str, Any]]]:
    """At the start and after each of 2 * STEPS steps: the rates of groups with parameters, the scheduler's state."""
    _, optimizer, make = made(case)
    scheduler = joined(case, optimizer, make(optimizer))
    rates, kept = [], []
    for _ in range(2 * STEPS + 1):
        rates.append([group["lr"] for group in optimizer.param_groups if group["params"]])
        kept.append(copy.deepcopy(scheduler.state_dict()))
        optimizer.step()
        scheduler.step()
    return rates, kept


def state(of: dict[str, Any]) -> str:
    """A scheduler's state but for the newest rates, which are those of the groups that there are."""
    return re.sub(r"'_last_lr': \[[^]]*\]", "", repr(of))


def through_deepspeed(case: dict[str, Any]) -> dict[str, Any]:
    """The same rates, or the error; and the final values of the trained weights."""
    expected, kept = without_deepspeed(case)
    start = STEPS if case.get("resumed") else 0
    model, optimizer, make = made(case)
    scheduler = make if case.get("called") else make(optimizer)
    if case.get("added"):
        optimizer.add_param_group({"params": []})
    passed = bool(case.get("called") or case.get("passed"))
    engine = on_cpu.engine(model, {"stage": case.get("stage", 0)}, optimizer, scheduler if passed else None)
    scheduler = joined(case, optimizer, scheduler)
    if case.get("resumed"):
        scheduler.load_state_dict(kept[start])
        for group, rate in zip(optimizer.param_groups, expected[start], strict=True):
            group["lr"] = rate
    found: dict[str, Any] = {"expected": expected[start : start + STEPS + 1], "rates": [], "error": None}
    found["rates"].append([group["lr"] for group in optimizer.param_groups])
    try:
        for _ in range(STEPS):
            engine.backward(engine(torch.tensor(FACTORS)))
            engine.step()
            if not passed:
                scheduler.step()
            found["rates"].append([group["lr"] for group in optimizer.param_groups])
    except (TypeError, ValueError) as error:
        found.update(error=str(error), log=traceback.format_exc())
    if not case.get("called") and "joined" not in case:
        found["same state"] = state(scheduler.state_dict()) == state(kept[start + STEPS])
    trained = {index: weight for index, weight in enumerate(engine.module.weights) if weight.requires_grad}
    with zero.GatheredParameters(list(trained.values())):
        found["weights"] = {index: weight.double().tolist() for index, weight in trained.items()}
    engine.destroy()
    return found


def main() -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="*", metavar="CASE", default=list(CASES))
    options = parser.parse_args()
    on_cpu.start()
    states.report(NAME, lambda: {name: through_deepspeed(CASES[name]) for name in options.cases}, options.out)
