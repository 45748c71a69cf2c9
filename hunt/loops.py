"""Loops of one's own: a small model, its data, and what steps over them are by the definition, in float64.

A step is one of plain SGD over eight samples; its gradient is read from what it has done to the parameters, which is
what counts, however they are sharded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from hunt.outcomes import Outcome
from tests.harness import side_by_side

STEPS, SAMPLES = 3, 8
#: Steps that float32 resolves; of a model in bfloat16 they are lost where no master weights are kept.
RATES = {"float32": 0.5, "bfloat16": 1e-3}
#: Of the learning rate, for each layer, where groups have their own.
SHARES = (1.0, 0.1, 0.4)
#: Samples of a step that use the last layer, and a step that does not: whole micro-batches, or those of one rank.
RARE = {"all": range(8), "not-first": range(2, 8), "not-last": range(6), "odd": range(1, 8, 2), "not-second": range(8)}


class Model(torch.nn.Module):
    """Two layers, and one that not every sample uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.rare = (torch.nn.Linear(*shape) for shape in ((8, 16), (16, 4), (8, 4)))

    def forward(self, x: torch.Tensor, uses: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(self.first(x).tanh())
        return y + self.rare(x) * uses if uses.any() else y


def model(groups: str, dtype: str, quantized: bool = False) -> Model:
    """The same every time; without the parameters of a group that is empty, or of a layer that is in four bits."""
    made = Model().to(getattr(torch, dtype))
    if quantized:
        made.second = in_four_bits(made.second)
    made.second.requires_grad_(groups != "empty" and not quantized)
    return made


def in_four_bits(layer: torch.nn.Linear) -> Any:
    """By bitsandbytes, which lies beside the environment, on whichever release of accelerate."""
    if (folder := str(side_by_side.folder("bitsandbytes-0.50"))) not in sys.path:
        sys.path.append(folder)
    import bitsandbytes

    made = bitsandbytes.nn.Linear4bit(
        layer.in_features, layer.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
    )
    made.weight.data.copy_(layer.weight.detach())
    return made.to("cpu")


def dequantized(model: Model) -> Model:
    """In place: by bitsandbytes' own function."""
    import bitsandbytes

    weight = model.second.weight
    plain = torch.nn.Linear(model.second.in_features, model.second.out_features, bias=False)
    plain.weight.data.copy_(bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state))
    model.second = plain.requires_grad_(False)
    return model


def batches(rare: str, dtype: torch.dtype) -> list[tuple[torch.Tensor, ...]]:
    """Of each step the inputs, the targets, and whether a sample uses the last layer."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for step in range(STEPS):
        x, y = (torch.randn(SAMPLES, width, generator=generator).bfloat16().to(dtype) for width in (8, 4))
        uses = torch.tensor([[sample in RARE[rare] and (rare, step) != ("not-second", 1)] for sample in range(SAMPLES)])
        made.append((x, y, uses))
    return made


def micro_batches(batch: tuple[torch.Tensor, ...], accumulation: int, rank: int, ranks: int) -> Iterable[Any]:
    """A rank's of a step, in their order: those of all ranks at one time are samples that follow each other."""
    return zip(*(tensor.unflatten(0, (accumulation, ranks, -1))[:, rank] for tensor in batch), strict=True)


def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor, uses: torch.Tensor) -> torch.Tensor:
    return (model(x, uses).float() - y.float() if x.dtype == torch.bfloat16 else model(x, uses) - y).square().mean()


def optimizer(model: Model, groups: str, dtype: str) -> torch.optim.Optimizer:
    """SGD with one group of parameters, or with one for each layer, each with a learning rate of its own."""
    rate = RATES[dtype]
    if groups == "one":
        return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=rate)
    layers = zip((model.first, model.second, model.rare), SHARES, strict=True)
    made = [{"params": [each for each in layer.parameters() if each.requires_grad], "lr": rate * share}
            for layer, share in layers]  # fmt: skip
    return torch.optim.SGD(made, lr=rate)


def scheduler(optimizer: torch.optim.Optimizer, schedule: str | None) -> Any:
    """None, where another one is asked for."""
    falling: Callable[[int], float] = lambda step: 1 / (step + 1)  # noqa: E731
    return torch.optim.lr_scheduler.LambdaLR(optimizer, falling) if schedule == "falling" else None


def by_definition(*, groups: str, schedule: str | None, rare: str, dtype: str, quantized: bool = False) -> Outcome:
    """One process, one micro-batch, float64; the weights are those of the dtype."""
    made = model(groups, dtype, quantized)
    made = (dequantized(made) if quantized else made).double()
    sgd = optimizer(made, groups, dtype)
    falling, kept = scheduler(sgd, schedule), Kept(made.state_dict(), dtype)
    for batch in batches(rare, torch.float64):
        sgd.zero_grad()
        loss = loss_of(made, *batch)
        loss.backward()
        norm = torch.cat([each.grad.flatten() for each in made.parameters() if each.grad is not None]).norm()
        sgd.step()
        if falling:
            falling.step()
        kept.step(made.state_dict(), loss, [group["lr"] for group in sgd.param_groups if group["params"]], norm)
    return kept.found


class Kept:
    """What steps have done.

    Attributes:
        found: losses, gradients, norms (where one is told), learning rates of groups that have parameters, parameters.
    """

    def __init__(self, start: Mapping[str, Any], dtype: str) -> None:
        self.found: dict[str, dict[str, Any]] = {part: {} for part in ("loss", "gradient", "norm", "rates", "state")}
        self._before, self._rate = self._copied(start), RATES[dtype]

    def step(self, after: Mapping[str, Any], loss: Any, rates: list[float], norm: Any = None) -> None:
        """After each; ``after`` has whole parameters, ``loss`` is the mean over all ranks."""
        step = len(self.found["loss"])
        self.found["loss"][f"step {step}"] = loss
        if norm is not None:
            self.found["norm"][f"step {step}"] = norm
        now = self._copied(after)
        for name, value in now.items():
            self.found["gradient"][f"step {step} {name}"] = (self._before[name] - value) / self._rate
        self.found["rates"] = {"last": rates}
        self.found["state"] = self._before = now

    @staticmethod
    def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
        """Without what is in four bits."""
        return {name: each.detach().double().clone() for name, each in values.items() if each.is_floating_point()}


def mean_over_ranks(loss: torch.Tensor) -> torch.Tensor:
    import torch.distributed as dist

    mean = loss.detach().double()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()
