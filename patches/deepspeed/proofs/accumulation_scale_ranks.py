"""One step of a DeepSpeed pipeline with one stage per rank: ``--out FOLDER PATCH CASE ...``.

The reference is float64 in one process: the mean over all micro-batches. With plain SGD, a parameter's change divided
by the learning rate is its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from rlhf_patches.patches.deepspeed.proofs import on_cpu
from rlhf_patches.proving import states

WIDTH, ROWS = 6, 3
RATE = 1.0  # bfloat16 rounds parameters by 2**-9 of their size; a small step would be lost
Gradients = dict[int, list[torch.Tensor]]
"""By the number of the layer; parameters use the same keys."""


class Layer(torch.nn.Linear):
    """A layer with the same weights for the same number."""

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


def data(replicas: int = 1, micro_batches: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Inputs and targets of every micro-batch of every replica."""
    shape = (replicas, micro_batches, 2, ROWS, WIDTH)
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(dtype)


def exactly(numbers: Sequence[int], samples: torch.Tensor) -> tuple[Gradients, float]:
    """Gradients and the loss.

    Args:
        numbers: of the layers, the same number for the same weights.
        samples: of `data`.
    """
    layers = {number: Layer(number).to(samples.dtype).double() for number in numbers}
    losses = []
    for x, y in samples.double().flatten(0, 1):
        for number in numbers:
            x = layers[number](x)
        losses.append(loss_of(x, y))
    loss = torch.stack(losses).mean()
    loss.backward()
    return {number: [_gradient(each) for each in layer.parameters()] for number, layer in layers.items()}, float(loss)


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def engine(module: torch.nn.Module, samples: torch.Tensor, stage: int = 0, clip: float = 0.0) -> Any:
    """DeepSpeed's engine for these samples, with a stage of ZeRO."""
    return on_cpu.engine(
        module,
        {"stage": stage},
        torch.optim.SGD(module.parameters(), lr=RATE),
        gradient_accumulation_steps=samples.shape[1],
        gradient_clipping=clip,
        steps_per_print=1000,  # None is the default, and not every release can divide by it
        bf16={"enabled": samples.dtype == torch.bfloat16},
    )


def pipeline(specs: Sequence[Any], stages: int) -> tuple[Any, dict[int, Any]]:
    """The module, and the layers of this rank by their numbers."""
    from deepspeed.pipe import PipelineModule

    module = PipelineModule(specs, num_stages=stages, loss_fn=loss_of, partition_method="uniform")
    return module, {int(name): layer for name, layer in module.named_children() if name.isdigit()}


def values(layers: dict[int, Any]) -> Gradients:
    """Copies of the parameters."""
    return {number: [each.detach().double().clone() for each in layers[number].parameters()] for number in layers}


def wrong(before: Gradients, after: Gradients, gradients: Gradients, clipped: float = 1.0) -> dict[str, Any]:
    """The error of this rank's gradients, relative to the right ones."""
    ways = torch.cat([((a - b) / RATE).flatten() for n in before for a, b in zip(before[n], after[n], strict=True)])
    exact = clipped * torch.cat([each.flatten() for number in before for each in gradients[number]])
    return {
        "error": float((ways - exact).norm() / exact.norm()),
        "times": float(ways @ exact / exact.square().sum()),
    }


def outcome() -> dict[str, Any]:
    from deepspeed.pipe import LayerSpec

    numbers, samples = range(2 * dist.get_world_size()), data()
    gradients, _ = exactly(numbers, samples)
    module, layers = pipeline([LayerSpec(Layer, number) for number in numbers], dist.get_world_size())
    made = engine(module, samples)
    before = values(layers)
    made.train_batch(iter([tuple(each) for each in samples[0]]))
    found = wrong(before, values(layers), gradients)
    made.destroy()
    return found


CASES: dict[str, Callable[[], dict[str, Any]]] = {"pipeline": outcome}


def main(cases: dict[str, Callable[[], dict[str, Any]]] = CASES) -> None:
    parser = states.parser()
    parser.add_argument("patch")
    parser.add_argument("cases", nargs="+", choices=cases, metavar="CASE")
    options = parser.parse_args()
    on_cpu.start()
    states.report(options.patch, lambda: {case: cases[case]() for case in options.cases}, options.out)
