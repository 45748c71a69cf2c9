"""A matrix that two ranks share: ``--out FOLDER [CASE ...]``, on one or two ranks, against Muon in float64."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from rlhf_patches.patches.deepspeed.proofs import muon, on_cpu
from rlhf_patches.patches.deepspeed.proofs.zero3_rare_parameters_ranks import Operations
from rlhf_patches.proving import states
from rlhf_patches.testing import applied

NAME = "deepspeed-muon-split-matrices"
OWN = ("Muon", "ZeRO", "average_tensor", "allreduce_no_retain", "get_flat_partition", "muon_update")
ANOTHER = {"optimizer": {"type": "Adamax", "params": {"lr": 0.01}}}
CASES = {
    "stage 1": muon.Case(stage=1),
    "stage 2": muon.Case(stage=2, micro_batches=2),
    "together": muon.Case(stage=2, micro_batches=2),
    "reduced": muon.Case(stage=2, zero={"use_multi_rank_bucket_allreduce": False}),
    "large": muon.Case(stage=1, zero={"reduce_bucket_size": 120}),  # the square matrix does not fit
    "round robin": muon.Case(stage=2, zero={"round_robin_gradients": True}),
    "overlapping": muon.Case(stage=2, zero={"overlap_comm": True}),
    "bfloat16": muon.Case(stage=2, micro_batches=2, dtype=torch.bfloat16),
    "whole": muon.Case(stage=1, zero={"reduce_scatter": False}),
    "not contiguous": muon.Case(stage=2, zero={"contiguous_gradients": False}),
    "offload": muon.Case(stage=2, zero=on_cpu.OFFLOADED),
    "another optimizer": muon.Case(stage=2, config=ANOTHER),
    "another optimizer, reduced": muon.Case(stage=2, zero={"use_multi_rank_bucket_allreduce": False}, config=ANOTHER),
}


def operations(case: muon.Case) -> list[str]:
    """The collectives of three steps."""
    made = muon.engine(case, muon.fresh(case))
    with Operations() as operations:
        muon.train(made, case, dist.get_rank(), dist.get_world_size())
    made.destroy()
    return [each for each in operations.seen if "c10d" in each]


def own(name: str) -> dict[str, Any]:
    """Steps in which a function of the optimizer, or the class of one of the two optimizers, is a user's."""
    if name == "muon_update":
        module: Any = importlib.import_module("deepspeed.runtime.zero.stage_1_and_2")
        update = module.muon_update
        with mock.patch.object(module, name, lambda *args, **kwargs: update(*args, **kwargs)):
            return muon.outcome(CASES["reduced"])
    case = CASES["reduced"]
    made = muon.engine(case, muon.fresh(case))
    if name in ("Muon", "ZeRO"):
        changed = made.optimizer.optimizer if name == "Muon" else made.optimizer
        changed.__class__ = type(f"Own{type(changed).__name__}", (type(changed),), {"__module__": "mine"})
    else:
        released = getattr(made.optimizer, name)
        setattr(made.optimizer, name, lambda *args, **kwargs: released(*args, **kwargs))
    muon.train(made, case, dist.get_rank(), dist.get_world_size())
    found = muon.weights(made)
    vars(made.optimizer).pop(name, None)
    made.destroy()
    return muon.off(case, found, dist.get_world_size())


def main() -> None:
    parser = states.parser()
    parser.add_argument("--more", action="store_true")
    parser.add_argument("cases", nargs="*", metavar="CASE")
    options = parser.parse_args()
    muon.start()

    def observe() -> dict[str, Any]:
        found: dict[str, Any] = {}
        for case in options.cases:
            # From 0.17.6 to 0.18.2, ZeRO-2 trains on the last micro-batch alone without the other patch.
            with applied("deepspeed-zero2-accumulation") if case == "together" else contextlib.nullcontext():
                found[case] = muon.outcome(CASES[case])
        if options.more:
            found["collectives"] = {case: operations(CASES[case]) for case in ("stage 1", "stage 2")}
            found["own"] = {name: own(name) for name in OWN}
        return found

    states.report(NAME, observe, options.out)
