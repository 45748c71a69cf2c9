"""One step of several micro-batches, by DeepSpeed and by the definition: ``--out FOLDER PATCH CASE ...``.

Pipelines on as many ranks as there are, and the engine itself with and without `no_sync()`. The yardstick is float64 in
one process: the mean over all micro-batches of all ranks. With plain SGD each parameter's way over the rate is its
gradient.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rlhf_patches.patches.deepspeed.proofs import on_cpu
from rlhf_patches.proving import states

WIDTH, ROWS = 6, 3
RATE = 1.0  # bfloat16 parameters are rounded by 2**-9 of their own size, which a small step would not be above


@dataclass(frozen=True)
class Case:
    """One configuration.

    Attributes:
        pipeline: the engine of `PipelineModule`, with `stages` of them; all ranks are stages if 0.
        tied: the first layer and the last one are the same.
        unsynced: of the engine itself: all micro-batches but the last one run in `no_sync()`.
        caller: the caller divides by the micro-batches, and says so with ``scale_wrt_gas=False``.
    """

    pipeline: bool = True
    stages: int = 0
    stage: int = 0
    micro_batches: int = 4
    tied: bool = False
    dtype: torch.dtype = torch.float32
    clip: float = 0.0
    unsynced: bool = False
    caller: bool = False


CASES = {
    "pipeline": Case(),
    "pipeline, ZeRO-1": Case(stage=1),
    "pipeline, clipped": Case(stage=1, clip=0.2),
    "pipeline, bfloat16": Case(stage=1, dtype=torch.bfloat16),
    "pipeline, tied": Case(tied=True),
    "pipeline, tied, ZeRO-1": Case(tied=True, stage=1),
    "pipeline, one micro-batch": Case(micro_batches=1),
    "pipeline, one stage": Case(stages=1),
    "no_sync": Case(pipeline=False, unsynced=True),
    "no_sync, ZeRO-1": Case(pipeline=False, unsynced=True, stage=1),
    "no_sync, bfloat16": Case(pipeline=False, unsynced=True, stage=1, dtype=torch.bfloat16),
    "no_sync, one micro-batch": Case(pipeline=False, unsynced=True, micro_batches=1),
    "no_sync, caller's": Case(pipeline=False, unsynced=True, caller=True),
    "engine": Case(pipeline=False),
    "engine, ZeRO-1": Case(pipeline=False, stage=1),
    "engine, ZeRO-2": Case(pipeline=False, stage=2),
    "engine, caller's": Case(pipeline=False, caller=True),
}


class Layer(torch.nn.Linear):
    """The same wherever it is made."""

    def __init__(self, number: int) -> None:
        super().__init__(WIDTH, WIDTH)
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).tanh()


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def ranks() -> int:
    return dist.get_world_size()


def stages(case: Case) -> int:
    return case.stages or ranks()


def numbers(case: Case) -> list[int]:
    """Of the layers, the same number for the same weights."""
    found = list(range(2 * stages(case)))
    return [*found[:-1], 0] if case.tied else found


def data(case: Case) -> torch.Tensor:
    """Inputs and targets of every micro-batch of every replica."""
    replicas = ranks() // stages(case) if case.pipeline else ranks()
    shape = (replicas, case.micro_batches, 2, ROWS, WIDTH)
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(case.dtype)


def exactly(case: Case) -> tuple[dict[int, list[torch.Tensor]], float, float]:
    """Gradients by the layers' numbers, the loss, and the norm."""
    layers = {number: Layer(number).to(case.dtype).double() for number in numbers(case)}
    losses = []
    for x, y in data(case).double().flatten(0, 1):
        for number in numbers(case):
            x = layers[number](x)
        losses.append(loss_of(x, y))
    loss = torch.stack(losses).mean()
    loss.backward()
    gradients = {number: [_gradient(each) for each in layer.parameters()] for number, layer in layers.items()}
    norm = math.sqrt(sum(float(each.square().sum()) for layer in gradients.values() for each in layer))
    return gradients, float(loss), norm


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def configuration(case: Case) -> dict[str, Any]:
    return {
        "gradient_accumulation_steps": case.micro_batches,
        "gradient_clipping": case.clip,
        "steps_per_print": 1000,  # None, which is a default, is not what every release can divide by
        "bf16": {"enabled": case.dtype == torch.bfloat16},
    }


def pipeline(case: Case) -> tuple[Any, dict[int, Any]]:
    """The engine, and the layers of this rank by their numbers."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    specs = [
        TiedLayerSpec("tied", Layer, number, tied_weight_attr=["weight", "bias"])
        if case.tied and not number
        else LayerSpec(Layer, number)
        for number in numbers(case)
    ]
    module = PipelineModule(specs, num_stages=stages(case), loss_fn=loss_of, partition_method="uniform")
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    engine = on_cpu.engine(module, {"stage": case.stage}, optimizer, **configuration(case))
    layers = {int(name): layer for name, layer in module.named_children() if name.isdigit()}
    if case.tied:
        layers |= {0: module.tied_modules["tied"]} if len(module.tied_modules) else {}
    return engine, layers


def plain(case: Case) -> tuple[Any, dict[int, Any]]:
    """The same without pipelines."""
    module = torch.nn.Sequential(*(Layer(number) for number in numbers(case))).to(case.dtype)
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    engine = on_cpu.engine(module, {"stage": case.stage}, optimizer, **configuration(case))
    return engine, dict(enumerate(engine.module.children()))


def step(case: Case, engine: Any, rank: int) -> float:
    """A step of the engine itself."""
    total = 0.0
    for number, (x, y) in enumerate(data(case)[rank]):
        last = number == case.micro_batches - 1
        with contextlib.nullcontext() if last or not case.unsynced else engine.no_sync():
            engine.set_gradient_accumulation_boundary(last)
            loss = loss_of(engine(x), y)
            total += float(loss) / case.micro_batches
            if case.caller:
                engine.backward(loss / case.micro_batches, scale_wrt_gas=False)
            else:
                engine.backward(loss)
        if last or not case.unsynced:
            engine.step()
    return total


def values(layers: dict[int, Any]) -> dict[int, list[torch.Tensor]]:
    """Copies of the parameters."""
    return {number: [each.detach().double().clone() for each in layers[number].parameters()] for number in layers}


def outcome(case: Case, rank: int) -> dict[str, Any]:
    """What is wrong of this rank's gradients and of the losses, as a part of what is right; and for "bit for bit"."""
    right, right_loss, right_norm = exactly(case)
    engine, layers = pipeline(case) if case.pipeline else plain(case)
    before = values(layers)
    found: dict[str, Any] = {}
    if case.pipeline:
        replicas = data(case)
        own = replicas[engine.grid.get_data_parallel_id()]
        evaluated = engine.eval_batch(iter([tuple(each) for each in own]))
        loss = float(engine.train_batch(iter([tuple(each) for each in own])))
        found["losses off"] = max(abs(float(each) / right_loss - 1) for each in (evaluated, loss))
    else:
        step(case, engine, rank)
    after = values(layers)
    clipped = min(1.0, case.clip / right_norm) if case.clip else 1.0
    ways = torch.cat([((a - b) / RATE).flatten() for n in before for a, b in zip(before[n], after[n], strict=True)])
    exact = clipped * torch.cat([each.flatten() for number in before for each in right[number]])
    norm = engine.get_global_grad_norm()
    found.update(
        error=float((ways - exact).norm() / exact.norm()),
        times=float(ways @ exact / exact.square().sum()),
        norm=None if norm is None else float(norm) / right_norm,
        bits=[float(each.sum()).hex() for layer in after.values() for each in layer],
        attributes=sorted(vars(engine)),
    )
    engine.destroy()
    return found


def main() -> None:
    parser = states.parser()
    parser.add_argument("patch")
    parser.add_argument("cases", nargs="+", metavar="CASE")
    options = parser.parse_args()
    rank = on_cpu.start()
    states.report(options.patch, lambda: {case: outcome(CASES[case], rank) for case in options.cases}, options.out)
