"""Steps of several micro-batches on each of two ranks, by DeepSpeed and by the definition.

Each worker has its own `main`, which passes a patch and its cases to `report`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rlhf_patches.patches.deepspeed.proofs import on_cpu
from rlhf_patches.proving import states

STEPS, RANKS = 3, 2


@dataclass(frozen=True)
class Case:
    """One configuration.

    Attributes:
        micro_batches: per step.
        by_hand: `set_gradient_accumulation_boundary` marks the end of a step; gradient_accumulation_steps is 1.
        rare: the micro-batches of a step that use the whole model; the others do not use its last layer.
        idle: the steps without a micro-batch that uses that layer.
        touched: each loss contains every parameter, times 0.
        masters: the optimizer's copy of the parameters and its gradients are also bfloat16.
        accumulate: the configuration's ``grad_accum_dtype``.
        contiguous: the configuration's ``contiguous_gradients``.
        zero: more of the configuration's ``zero_optimization``.
    """

    stage: int = 2
    micro_batches: int = 4
    offload: bool = True
    by_hand: bool = False
    clip: float = 0.0
    dtype: torch.dtype = torch.float32
    rare: tuple[int, ...] | None = None
    idle: tuple[int, ...] = ()
    touched: bool = False
    masters: bool = False
    accumulate: str | None = None
    contiguous: bool = True
    zero: Mapping[str, Any] = field(default_factory=dict)


class Model(torch.nn.Module):
    """Two layers, and a third one that not every micro-batch uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.rare = (torch.nn.Linear(*shape) for shape in ((8, 16), (16, 4), (8, 4)))

    def forward(self, x: torch.Tensor, whole: bool) -> torch.Tensor:
        y: torch.Tensor = self.second(self.first(x).tanh())
        return y + self.rare(x) if whole else y


def data(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets by step, micro-batch and rank."""
    generator = torch.Generator().manual_seed(5)
    shape = (STEPS, case.micro_batches, RANKS, 2)
    x, y = (torch.randn(*shape, width, generator=generator).to(case.dtype) for width in (8, 4))
    return x, y


def loss_of(case: Case, step: int, number: int, model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The loss of a micro-batch, by its number within the step."""
    whole = step not in case.idle and (case.rare is None or number in case.rare)
    loss: torch.Tensor = ((model(x, whole) - y) ** 2).sum()
    return loss + sum((0 * parameter).sum() for parameter in model.parameters()) if case.touched else loss


def fresh(case: Case) -> Model:
    torch.manual_seed(0)
    return Model().to(case.dtype)


def whole(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Its values, flattened. ZeRO-3 waits only for the last of several parameters, which is not enough with gloo."""
    from deepspeed import zero

    with zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
        return parameter.detach().double().flatten().clone()


def by_deepspeed(case: Case, rank: int) -> tuple[list[float], torch.Tensor, dict[str, Any]]:
    """The norm of each step's gradient before clipping, the final parameters, and the optimizer's attributes."""
    zero: dict[str, Any] = {"stage": case.stage, "contiguous_gradients": case.contiguous, **case.zero}
    if case.stage == 3:
        # Otherwise all are gathered at once after a step (see `whole`), and 0.15.2 raises if a prefetched parameter
        # is not used.
        zero.update(stage3_param_persistence_threshold=0, stage3_prefetch_bucket_size=0)
    if case.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    bf16 = {
        "enabled": case.dtype == torch.bfloat16,
        **({"bf16_master_weights_and_grads": True} if case.masters else {}),
    }
    engine = on_cpu.engine(
        fresh(case),
        zero,
        gradient_accumulation_steps=1 if case.by_hand else case.micro_batches,
        gradient_clipping=case.clip,
        bf16=bf16,
        data_types={"grad_accum_dtype": case.accumulate},
    )
    norms = []
    for step, (xs, ys) in enumerate(zip(*data(case), strict=True)):
        for number, (x, y) in enumerate(zip(xs[:, rank], ys[:, rank], strict=True)):
            last = number == case.micro_batches - 1
            loss = loss_of(case, step, number, engine, x, y)
            if case.by_hand:
                engine.set_gradient_accumulation_boundary(last)
                loss = loss / case.micro_batches
            engine.backward(loss)
            if last or not case.by_hand:
                engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    parameters = torch.cat([whole(parameter) for parameter in engine.module.parameters()])
    has = {
        "attributes": sorted(vars(engine.optimizer)),
        "buffers": len(getattr(engine.optimizer, "accumulated_grads_in_cpu", {})),
    }
    engine.destroy()
    return norms, parameters, has


def exactly(case: Case) -> tuple[list[float], torch.Tensor]:
    """The same, by the definition: the mean over micro-batches and ranks, clipped as a whole, plain SGD."""
    model = fresh(case).double()
    norms = []
    for step, (xs, ys) in enumerate(zip(*(tensor.double() for tensor in data(case)), strict=True)):
        losses = [
            loss_of(case, step, number, model, x, y)
            for number, ranks in enumerate(zip(xs, ys, strict=True))
            for x, y in zip(*ranks, strict=True)
        ]
        gradients = torch.autograd.grad(
            torch.stack(losses).mean(), list(model.parameters()), allow_unused=True, materialize_grads=True
        )
        norm = float(torch.cat([gradient.flatten() for gradient in gradients]).norm())
        scale = min(1.0, case.clip / norm) if case.clip else 1.0
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= on_cpu.LEARNING_RATE * scale * gradient
        norms.append(norm)
    return norms, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def outcome(case: Case, rank: int) -> dict[str, Any]:
    """Norms, their bits, and the error of the parameters' change from start to end, at most 1."""
    norms, parameters, has = by_deepspeed(case, rank)
    right_norms, right = exactly(case)
    start = torch.cat([parameter.detach().double().flatten() for parameter in fresh(case).parameters()])
    return {
        "norms": norms,
        "right norms": right_norms,
        "norm error": max(abs(a - b) / b for a, b in zip(norms, right_norms, strict=True)),
        "error": float((parameters - right).norm() / (right - start).norm()),
        **has,
        "bits": [*(norm.hex() for norm in norms), float(parameters.sum()).hex(), float(parameters.norm()).hex()],
    }


def report(name: str, cases: Mapping[str, Case]) -> None:
    """The worker ``--out FOLDER [CASE ...]``: each case before apply() of a patch, after it, and after revert().

    Without named cases, it omits those with bfloat16 masters, which older releases do not support.
    """
    parser = states.parser()
    parser.add_argument("cases", nargs="*", metavar="CASE", default=[name for name in cases if not cases[name].masters])
    options = parser.parse_args()
    rank = on_cpu.start()
    states.report(name, lambda: {case: outcome(cases[case], rank) for case in options.cases}, options.out)
