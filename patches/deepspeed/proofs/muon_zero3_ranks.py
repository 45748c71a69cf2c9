"""Muon under ZeRO-3: ``--out FOLDER [CASE ...]``, on two ranks, against Muon's definition in float64."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlhf_patches.patches.deepspeed.proofs import muon, on_cpu
from rlhf_patches.patches.deepspeed.proofs.zero3_rare_parameters_ranks import Operations
from rlhf_patches.proving import states
from rlhf_patches.testing import applied

NAME = "deepspeed-muon-zero3"
SMALL = {"reduce_bucket_size": 120}  # the square matrix does not fit
CASES = {
    "accumulated": muon.Case(stage=3, micro_batches=3),
    "one micro-batch": muon.Case(stage=3),
    "large": muon.Case(stage=3, zero=SMALL),
    "large, accumulated": muon.Case(stage=3, micro_batches=3, zero=SMALL),
    "rare": muon.Case(stage=3, micro_batches=3, rare=(1,)),
    "sub-groups": muon.Case(stage=3, micro_batches=2, zero={"sub_group_size": 100}),
    "bfloat16": muon.Case(stage=3, micro_batches=2, dtype=torch.bfloat16),
    "in memory": muon.Case(stage=3, micro_batches=2, zero={"save_muon_momentum_buffer_in_memory": True}),
    "offload": muon.Case(stage=3, micro_batches=2, zero=on_cpu.OFFLOADED),
    "stage 2": muon.Case(stage=2, micro_batches=3),
    "not contiguous": muon.Case(stage=3, micro_batches=1, zero={"contiguous_gradients": False}),
}


def operations(case: muon.Case) -> list[str]:
    """The operators of three steps."""
    made = muon.engine(case, muon.fresh(case))
    with Operations() as operations:
        muon.train(made, case, dist.get_rank(), dist.get_world_size())
    made.destroy()
    return operations.seen


def own(name: str) -> dict[str, Any]:
    """Steps in which a method of the optimizer is a user's."""
    case = CASES["accumulated"]
    made = muon.engine(case, muon.fresh(case))
    released = getattr(made.optimizer, name)
    setattr(made.optimizer, name, lambda *args, **kwargs: released(*args, **kwargs))
    muon.train(made, case, dist.get_rank(), dist.get_world_size())
    found = muon.weights(made)
    delattr(made.optimizer, name)
    made.destroy()
    return muon.off(case, found, dist.get_world_size())


def read() -> list[float]:
    """The error of the gradient that is read between backward() and step(): of one micro-batch, and of two."""
    from deepspeed.utils import safe_get_full_grad

    found = []
    for number in (1, 2):
        case = muon.Case(stage=3, micro_batches=number)
        made = muon.engine(case, muon.fresh(case))
        model = muon.fresh(case).double()
        xs, ys = (tensor[0, :, 0].double() for tensor in muon.data(case, 1))
        losses = [((model(x) - y) ** 2).mean() for x, y in zip(xs, ys, strict=True)]
        right = torch.autograd.grad(torch.stack(losses).mean(), model.square.weight)[0]
        for x, y in zip(xs.float(), ys.float(), strict=True):
            made.backward(((made(x) - y) ** 2).mean())
            gradient = safe_get_full_grad(made.module.square.weight)
            made.step()
        found.append(float((gradient.double() - right).norm() / right.norm()))
        made.destroy()
    return found


def main() -> None:
    parser = states.parser()
    parser.add_argument("--more", action="store_true")
    parser.add_argument("cases", nargs="*", metavar="CASE")
    options = parser.parse_args()
    muon.start()
    folder, numbers = Path(states.folder()), iter(range(3))

    def observe() -> dict[str, Any]:
        found: dict[str, Any] = {}
        for case in options.cases:
            with contextlib.ExitStack() as stack:
                if case == "rare":  # sums of such parameters are right with this patch only
                    stack.enter_context(applied("deepspeed-zero3-rare-parameters"))
                found[case] = muon.outcome(CASES[case])
        if options.more:
            found["operations"] = operations(CASES["one micro-batch"])
            found["own"] = {name: own(name) for name in ("step", "partition_grads", "_get_norm_groups")}
            found["read"] = read()
            number, case = next(numbers), CASES["accumulated"]
            muon.saved(folder / str(number), case)
            found["resumed"] = {of: muon.resumed(folder / str(of), case) for of in range(number + 1)}
        return found

    states.report(NAME, observe, options.out)
