"""deepspeed-zero3-rare-parameters, with and without offload (steps.py)."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_patches.patches.deepspeed.proofs import on_cpu, steps
from rlhf_patches.proving import states

NAME = "deepspeed-zero3-rare-parameters"
KINDS: dict[str, dict[str, Any]] = {
    "in all": {},
    "not in the first": {"rare": (1, 2, 3)},
    "not in the last": {"rare": (0, 1, 2)},
    "not in the second step": {"micro_batches": 1, "idle": (1,)},
    "only in the first step": {"idle": (1, 2)},
    "in one, clipped": {"rare": (1,), "idle": (1,), "clip": 1.0},
    "by hand": {"by_hand": True, "rare": (1,)},
    "bfloat16": {"rare": (1,), "idle": (1,), "dtype": torch.bfloat16},
    "whole reduced": {"rare": (1,), "zero": {"reduce_scatter": False}},
    "not contiguous": {"rare": (1,), "contiguous": False},
    "in sub-groups": {"rare": (1,), "zero": {"sub_group_size": 100}},
    "overlapped": {"rare": (1,), "zero": {"overlap_comm": True}},
}
CASES = {
    f"{'offload, ' * offload}{kind}": steps.Case(stage=3, offload=offload, **settings)
    for offload in (False, True)
    for kind, settings in KINDS.items()
}


class Operations(TorchDispatchMode):
    """The operators that were called, including collectives, with the size of each result."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        size = made.numel() * made.element_size() if isinstance(made, torch.Tensor) else 0
        self.seen.append(f"{func} {size}")
        return made


def operations(offload: bool, rank: int) -> list[str]:
    """The operators of three steps in which every micro-batch uses every parameter."""
    with Operations() as operations:
        steps.by_deepspeed(CASES["offload, in all" if offload else "in all"], rank)
    return operations.seen


def set_by_hand(offload: bool, rank: int) -> list[float]:
    """The gradient of a layer that a step did not use, and the step's change after it was set to ones."""
    from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

    case = steps.Case(stage=3, micro_batches=1, offload=offload)
    zero: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    engine = on_cpu.engine(steps.fresh(case), zero, gradient_clipping=0.0)
    (x, y), rare = (tensor[:, 0, rank] for tensor in steps.data(case)), engine.module.rare.weight
    engine.backward(((engine(x[0], True) - y[0]) ** 2).sum())
    engine.step()
    engine.backward(((engine(x[1], False) - y[1]) ** 2).sum())
    unused = safe_get_full_grad(rare)
    safe_set_full_grad(rare, torch.ones(rare.ds_shape))
    before = steps.whole(rare)
    engine.step()
    way = (before - steps.whole(rare)) / on_cpu.LEARNING_RATE
    engine.destroy()
    return [float(unused.abs().max()), float(way.min()), float(way.max())]


def main() -> None:
    for module in ("stage3", "parameter_offload", "partition_parameters"):  # before their reports are disabled
        importlib.import_module(f"deepspeed.runtime.zero.{module}")
    import deepspeed

    # Before 0.16 it runs the program numactl.
    deepspeed.get_accelerator().device_count = lambda: steps.RANKS
    parser = states.parser()
    parser.add_argument("--more", action="store_true")
    parser.add_argument("cases", nargs="*", metavar="CASE")
    options = parser.parse_args()
    rank = on_cpu.start()

    def observe(cases: list[str]) -> dict[str, Any]:
        found: dict[str, Any] = {case: steps.outcome(CASES[case], rank) for case in cases}
        if options.more:
            both = {"on the device": False, "offload": True}
            found["operations"] = {where: operations(offload, rank) for where, offload in both.items()}
            found["set by hand"] = {where: set_by_hand(offload, rank) for where, offload in both.items()}
        return found

    if options.more:
        states.report(NAME, lambda: observe(options.cases), options.out, reverted=False)
    else:
        states.report_cases(NAME, observe, options.cases, options.out, reverted=options.cases[:2])
