"""Steps by DeepSpeed's Muon, and by Muon's definition in float64.

Each worker has its own `main`, which passes a patch and its cases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlhf_patches.patches.deepspeed.proofs import on_cpu

STEPS, RATE, MOMENTUM, DECAY = 3, 0.02, 0.9, 0.1
SAMPLES = 24  # per micro-batch: gradients of full rank, since the iteration enlarges rounding in directions without one


@dataclass(frozen=True)
class Case:
    """One configuration.

    Attributes:
        stage: of ZeRO; None leaves the section out.
        micro_batches: per step.
        rare: the micro-batches that use the second layer; all by default.
        zero: more of the configuration's ``zero_optimization``.
        config: more of the configuration.
        built: the model is built within `zero.Init`.
    """

    stage: int | None = None
    micro_batches: int = 1
    dtype: torch.dtype = torch.float32
    rare: tuple[int, ...] | None = None
    zero: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    built: bool = False


class Model(torch.nn.Module):
    """Matrices: wide, tall and square, and one that not every micro-batch uses."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"tall": (8, 13), "square": (13, 13), "wide": (13, 6), "rare": (8, 6)}
        for name, shape in shapes.items():
            setattr(self, name, torch.nn.Linear(*shape, bias=False))

    def forward(self, x: torch.Tensor, whole: bool = True) -> torch.Tensor:
        y: torch.Tensor = self.wide(self.square(self.tall(x).tanh()).tanh())
        return y + self.rare(x) if whole else y


def data(case: Case, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets by step, micro-batch and rank."""
    generator = torch.Generator().manual_seed(5)
    shape = (STEPS, case.micro_batches, ranks, SAMPLES)
    x, y = (torch.randn(*shape, width, generator=generator).to(case.dtype) for width in (8, 6))
    return x, y


def fresh(case: Case) -> Model:
    torch.manual_seed(0)
    return Model().to(case.dtype)


def uses(case: Case, number: int) -> bool:
    return case.rare is None or number in case.rare


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Five steps of Newton-Schulz by https://kellerjordan.github.io/posts/muon, with its coefficients."""
    a, b, c = 3.4445, -4.7750, 2.0315
    found = matrix / matrix.norm()
    for _ in range(5):
        square = found @ found.mT
        found = a * found + (b * square + c * square @ square) @ found
    return found


def exactly(case: Case, ranks: int) -> torch.Tensor:
    """The parameters after all steps, by the definition: one update per step, from the mean over its micro-batches."""
    model = fresh(case).double()
    momenta = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for xs, ys in zip(*(tensor.double() for tensor in data(case, ranks)), strict=True):
        losses = [
            ((model(x, uses(case, number)) - y) ** 2).mean()
            for number, parts in enumerate(zip(xs, ys, strict=True))
            for x, y in zip(*parts, strict=True)
        ]
        gradients = torch.autograd.grad(torch.stack(losses).mean(), list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient, momentum in zip(model.parameters(), gradients, momenta, strict=True):
                momentum.mul_(MOMENTUM).add_(gradient, alpha=1 - MOMENTUM)
                nesterov = (1 - MOMENTUM) * gradient + MOMENTUM * momentum
                rows, columns = parameter.shape
                parameter.mul_(1 - RATE * DECAY)
                parameter.sub_(RATE * max(1, rows / columns) ** 0.5 * orthogonal(nesterov))
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def engine(case: Case, model: torch.nn.Module) -> Any:
    """An engine whose configuration names the optimizer."""
    import deepspeed

    parameters: dict[str, Any] = {"lr": RATE, "momentum": MOMENTUM, "weight_decay": DECAY}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": case.micro_batches,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "Muon", "params": parameters},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": case.dtype == torch.bfloat16},
        **case.config,
    }
    if case.stage is not None:
        buckets = {"reduce_bucket_size": 1000, "allgather_bucket_size": 1000, "overlap_comm": False}
        if case.stage == 3:  # see steps.by_deepspeed
            buckets.update(reduce_scatter=False, stage3_param_persistence_threshold=0, stage3_prefetch_bucket_size=0)
        config["zero_optimization"] = {"stage": case.stage, **buckets, **case.zero}
    made, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    return made


def train(made: Any, case: Case, rank: int, ranks: int, steps: range = range(STEPS)) -> None:
    """Train some of the steps."""
    xs, ys = (tensor[:, :, rank] for tensor in data(case, ranks))
    for step in steps:
        for number, (x, y) in enumerate(zip(xs[step], ys[step], strict=True)):
            made.backward(((made(x, uses(case, number)) - y) ** 2).mean())
            made.step()


def weights(made: Any) -> torch.Tensor:
    """Its parameters, flattened. ZeRO-3 waits only for the last of several parameters (see steps.whole)."""
    from deepspeed import zero

    found = []
    for parameter in made.module.parameters():
        with zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            found.append(parameter.detach().double().flatten().clone())
    return torch.cat(found)


def off(case: Case, found: torch.Tensor, ranks: int) -> dict[str, Any]:
    """The error of the parameters' way from start to end, the way's length, relative to the right one, and its bits."""
    start = torch.cat([parameter.detach().double().flatten() for parameter in fresh(case).parameters()])
    right = exactly(case, ranks)
    way = (right - start).norm()
    return {
        "error": float((found - right).norm() / way),
        "length": float((found - start).norm() / way),
        "bits": [float(found.sum()).hex(), float(found.norm()).hex()],
    }


def outcome(case: Case) -> dict[str, Any]:
    """What `off` says of a case."""
    import deepspeed

    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = fresh(case)
    if case.built:
        configuration = {"train_micro_batch_size_per_gpu": SAMPLES, "zero_optimization": {"stage": 3}}
        deepspeed.zero.Init(module=model, config_dict_or_path=configuration, dtype=case.dtype)
    made = engine(case, model)
    train(made, case, rank, ranks)
    found = weights(made)
    keys = sorted({key for state in made.optimizer.state.values() for key in state}) if case.stage is None else []
    made.destroy()
    return {**off(case, found, ranks), "states": keys}


def saved(folder: Path, case: Case) -> None:
    """Train one step, and save."""
    made = engine(case, fresh(case))
    train(made, case, dist.get_rank(), dist.get_world_size(), range(1))
    made.save_checkpoint(str(folder), tag="one")
    made.destroy()


def resumed(folder: Path, case: Case) -> dict[str, Any]:
    """Load, train the other steps, and say how far off the whole is."""
    made = engine(case, fresh(case))
    made.load_checkpoint(str(folder), tag="one")
    train(made, case, dist.get_rank(), dist.get_world_size(), range(1, STEPS))
    found = weights(made)
    made.destroy()
    return off(case, found, dist.get_world_size())


def start() -> None:
    """Start the process group; nothing is compiled, which takes most of the time."""
    on_cpu.start()
    if hasattr(torch.compiler, "set_stance"):
        torch.compiler.set_stance("force_eager")
