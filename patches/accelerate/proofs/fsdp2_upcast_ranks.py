"""Small updates under FSDP2 and mixed precision, through accelerate, on each of two ranks: ``--out FOLDER [CASE ...]``.

Each case before apply() of accelerate-fsdp2-upcast, after it, and after revert(); beside it the same steps in float64.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from accelerate import Accelerator

from rlhf_patches.patches.accelerate.proofs import fsdp2_on_cpu
from rlhf_patches.proving import states

NAME = "accelerate-fsdp2-upcast"
STEPS, RANKS, RATE = 8, 2, 1e-4
CASES: dict[str, dict[str, Any]] = {
    "whole": {},
    "efficient loading": {"efficient": True},
    "first layer frozen": {"frozen": True},
    "tied": {"tied": True},
    "float32": {"dtype": torch.float32},
    "no mixed precision": {"precision": "no"},
}


class Model(torch.nn.Module):
    """Three layers; the last two may share their weight, as an embedding and a head do."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.third = torch.nn.Linear(8, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
        self.tied = tied
        self.tie_weights()

    def tie_weights(self) -> None:
        """By the name under which accelerate looks for it."""
        if self.tied:
            self.third.weight = self.second.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.third(self.second(self.first(x).tanh()).tanh())
        return y


def fresh(case: dict[str, Any]) -> Model:
    torch.manual_seed(0)
    model = Model(bool(case.get("tied"))).to(case.get("dtype", torch.bfloat16))
    model.first.requires_grad_(not case.get("frozen"))
    return model


def batches() -> torch.Tensor:
    """Inputs by step and rank."""
    return torch.randn(STEPS, RANKS, 4, 8, generator=torch.Generator().manual_seed(5))


def flat(model: torch.nn.Module) -> torch.Tensor:
    """All that is trained, whole, in float64."""
    parameters = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in trained(model)]
    return torch.cat([one.detach().double().flatten() for one in parameters])


def trained(model: torch.nn.Module) -> list[Any]:
    return [one for one in model.parameters() if one.requires_grad]


def exactly(case: dict[str, Any]) -> torch.Tensor:
    """The same steps from the same start, by the definition: the mean over the ranks, plain SGD."""
    model = fresh(case).double()
    for batch in batches().double():
        loss = torch.stack([model(x).pow(2).sum() for x in batch]).mean()
        found = torch.autograd.grad(loss, trained(model))
        with torch.no_grad():
            for one, gradient in zip(trained(model), found, strict=True):
                one -= RATE * gradient
    return flat(model)


def through_accelerate(case: dict[str, Any], accelerator: Accelerator) -> dict[str, Any]:
    """``Accelerator``'s own preparation for FSDP2, then SGD."""
    model = fresh(case)
    start = flat(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model, optimizer = fsdp2_on_cpu.prepare(
            accelerator,
            model,
            torch.optim.SGD(model.parameters(), lr=RATE),
            case.get("precision", "bf16"),
            bool(case.get("efficient")),
        )
    for batch in batches():
        x = batch[accelerator.process_index].to(next(model.parameters()).dtype)
        model(x).float().pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    right = exactly(case)
    return {
        "dtypes": sorted({str(one.dtype) for one in trained(model)}),
        "frozen": sorted({str(one.dtype) for one in model.parameters() if not one.requires_grad}),
        "optimizer has them": {id(p) for group in optimizer.param_groups for p in group["params"]}
        >= {id(one) for one in trained(model)},
        "warned": sum("low precision" in str(one.message).replace("-", " ") for one in said),
        "error": float((flat(model) - right).norm() / (right - start).norm()),
        "bits": float(flat(model).norm()).hex(),
    }


def main() -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="*", default=[*CASES])
    options = parser.parse_args()
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    states.report(
        NAME, lambda: {name: through_accelerate(CASES[name], accelerator) for name in options.cases}, options.out
    )
