"""Muon without ZeRO: ``--out FOLDER [CASE ...]``, on one or more ranks, against Muon's definition in float64."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from rlhf_patches.patches.deepspeed.proofs import muon
from rlhf_patches.proving import states

NAME = "deepspeed-muon-without-zero"
CASES = {
    "float32": muon.Case(),
    "accumulated": muon.Case(micro_batches=3),
    "bfloat16": muon.Case(dtype=torch.bfloat16),
    "stage 0": muon.Case(stage=0),
    "stage 1": muon.Case(stage=1),
    "stage 2": muon.Case(stage=2, micro_batches=3),
}


def _optimizer(kind: Any = None) -> tuple[Any, list[torch.nn.Parameter]]:
    """The optimizer by itself, over a matrix, a vector and a matrix of Adam's."""
    found = importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer").MuonWithAuxAdam
    torch.manual_seed(2)
    matrix, vector, other = (torch.nn.Parameter(torch.randn(*shape)) for shape in ((6, 4), (4,), (4, 4)))
    groups = [
        {"params": [matrix, vector], "use_muon": True, "lr": muon.RATE, "momentum": muon.MOMENTUM},
        {"params": [other], "use_muon": False, "lr": 0.01},
    ]
    return (kind(found) if kind else found)(groups), [matrix, vector, other]


def by_itself(kind: Any = None) -> dict[str, Any]:
    """Two steps without an engine: the parameters, whether gradients stay, and what a step without one raises."""
    optimizer, parameters = _optimizer(kind)
    stay = []
    for step in range(2):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
        before = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
        optimizer.step()
        stay += [torch.equal(a, b.grad) for a, b in zip(before, parameters, strict=True) if b.grad is not None]
    found = {name: value.tolist() for name, value in zip(("matrix", "vector", "other"), parameters, strict=True)}
    parameters[0].grad = None
    try:
        optimizer.step()
        raised = ""
    except AttributeError as error:
        raised = str(error)
    return {**found, "stay": all(stay), "raised": raised}


def convolution(memory: torch.memory_format) -> list[float]:
    """A step of a convolution's weight in this order."""
    torch.manual_seed(2)
    weight, gradient = (torch.randn(6, 4, 3, 3).to(memory_format=memory) for _ in range(2))
    parameter = torch.nn.Parameter(weight)
    parameter.grad = gradient
    kind = importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer").MuonWithAuxAdam
    kind([{"params": [parameter], "use_muon": True, "lr": muon.RATE, "momentum": muon.MOMENTUM}]).step()
    return [float(each) for each in parameter.detach().flatten()]


def own(released: Any) -> Any:
    """A user's subclass."""
    return type("Own", (released,), {"__module__": "mine"})


def main() -> None:
    parser = states.parser()
    parser.add_argument("--more", action="store_true")
    parser.add_argument("cases", nargs="*", metavar="CASE")
    options = parser.parse_args()
    muon.start()
    folder, numbers = Path(states.folder()), iter(range(3))

    def observe() -> dict[str, Any]:
        found: dict[str, Any] = {case: muon.outcome(CASES[case]) for case in options.cases}
        if options.more:
            found |= {"by itself": by_itself(), "a subclass": by_itself(own)}
            found["convolutions"] = [convolution(each) for each in (torch.contiguous_format, torch.channels_last)]
            number = next(numbers)
            muon.saved(folder / str(number), CASES["float32"])
            found["resumed"] = {of: muon.resumed(folder / str(of), CASES["float32"]) for of in range(number + 1)}
        return found

    states.report(NAME, observe, options.out)
