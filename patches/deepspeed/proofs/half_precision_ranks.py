"""Steps in 16 bits without ZeRO: ``--out FOLDER PATCH CASE ...``, on one or more ranks, against float64."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlhf_patches.patches.deepspeed.proofs import muon
from rlhf_patches.proving import states
from rlhf_patches.testing import applied

STEPS, RATE = 4, 0.1
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "float32": torch.float32}
SCALE = {"initial_scale_power": 10}
FP16 = {"enabled": True, **SCALE}


def data(micro_batches: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets by step, micro-batch and rank."""
    generator = torch.Generator().manual_seed(1)
    shape = (STEPS, micro_batches, dist.get_world_size(), 16, 8)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def exactly(start: torch.Tensor, micro_batches: int) -> torch.Tensor:
    """The weights after all steps of SGD."""
    weight = start.double()
    for step in range(STEPS):
        weight = weight - RATE * gradient(weight, step, micro_batches)
    return weight


def fresh(kind: str) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(8, 8, bias=False).to(DTYPES[kind])


def made(kind: str, stage: int | None, micro_batches: int, **config: Any) -> Any:
    """An engine of one layer."""
    import deepspeed

    model = fresh(kind)
    zero = {"stage": stage, "reduce_bucket_size": 1000, "allgather_bucket_size": 1000}
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=RATE),
        config={
            "train_micro_batch_size_per_gpu": 16,
            "gradient_accumulation_steps": micro_batches,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": kind == "bf16"},
            "fp16": {"enabled": kind == "fp16", **SCALE},
            **({} if stage is None else {"zero_optimization": zero}),
            **config,
        },
    )
    return engine


def gradient(weight: torch.Tensor, step: int, micro_batches: int) -> torch.Tensor:
    """The gradient of one step, in float64."""
    x, y = (tensor[step].double().flatten(0, -2) for tensor in data(micro_batches))
    return 2 * (x @ weight.T - y).T @ x / y.numel()


def train(
    engine: Any,
    kind: str,
    micro_batches: int,
    how: str,
    steps: range = range(STEPS),
    norms: list[list[float]] | None = None,
) -> list[float]:
    """Train these steps; returns the losses that ``backward`` returns.

    Args:
        engine: of one layer.
        kind: of its numbers.
        micro_batches: per step.
        how: "cleared" if gradients are cleared after each step.
        steps: those to train.
        norms: gets each step's gradient norm, and that of the parameter's `grad` before it, divided by the right one.
    """
    found = []
    xs, ys = (tensor[:, :, dist.get_rank()] for tensor in data(micro_batches))
    for step in steps:
        right = gradient(engine.module.weight.detach().double(), step, micro_batches).norm()
        for x, y in zip(xs[step], ys[step], strict=True):
            loss = ((engine(x.to(DTYPES[kind])).float() - y) ** 2).mean()
            found.append(float(engine.backward(loss)))
            waiting = engine.module.weight.grad
            kept = 0.0 if waiting is None else float(waiting.float().norm())
            engine.step()
            if how == "cleared":
                engine.optimizer.zero_grad()
        if norms is not None:
            norms.append([each / float(right) for each in (float(engine.get_global_grad_norm() or 0.0), kept)])
    return found


def outcome(
    kind: str,
    stage: int | None = None,
    micro_batches: int = 1,
    how: str = "backward",
    own: str = "",
    config: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The error of the weights' way."""
    engine = made(kind, stage, micro_batches, **config or {})
    if own:  # a function of the user's in place of the optimizer's
        released = getattr(engine.optimizer, own)
        setattr(engine.optimizer, own, lambda *args, **kwargs: released(*args, **kwargs))
    start = engine.module.weight.detach().double().clone()
    norms: list[list[float]] = []
    losses = train(engine, kind, micro_batches, how, norms=norms)
    found, right = engine.module.weight.detach().double(), exactly(start, micro_batches)
    return {
        "error": float((found - right).norm() / (right - start).norm()),
        "loss": losses,
        "norms": norms,
        "bits": found.tolist(),
    }


CASES: dict[str, dict[str, Any]] = {
    "fp16": {"kind": "fp16", "stage": None},
    "fp16, accumulated": {"kind": "fp16", "stage": 0, "micro_batches": 2},
    "fp16, growing": {
        "kind": "fp16",
        "stage": None,
        "config": {"fp16": {"enabled": True, **SCALE, "loss_scale_window": 1}},
    },
    "fp16, skipped": {"kind": "fp16", "stage": None, "config": {"fp16": {"enabled": True, "initial_scale_power": 20}}},
    "fp16, own": {"kind": "fp16", "stage": None, "own": "step"},
    "fp16, stage 1": {"kind": "fp16", "stage": 1},
    "bf16": {"kind": "bf16", "stage": None},
    # Without the bug of deepspeed-unscaled-loss, which 0.18.3 to 0.18.5 have besides.
    "bf16, no scale": {"kind": "bf16", "stage": None, "config": {"fp16": {"enabled": False, "loss_scale": 1}}},
    "bf16, accumulated": {"kind": "bf16", "stage": 0, "micro_batches": 2},
    "bf16, own": {"kind": "bf16", "stage": None, "own": "zero_grad"},
    "bf16, cleared": {"kind": "bf16", "stage": None, "how": "cleared"},
    "bf16, stage 1": {"kind": "bf16", "stage": 1},
    "float32": {"kind": "float32", "stage": None},
}


def resumed(folder: Path, first: bool) -> list[float]:
    """Train two steps and save, or load and train the others: the weights' error, and the optimizer's scale."""
    engine = made("fp16", None, 1)
    start = engine.module.weight.detach().double().clone()
    if first:
        train(engine, "fp16", 1, "backward", range(2))
        engine.save_checkpoint(str(folder), tag="two")
        return []
    engine.load_checkpoint(str(folder), tag="two")
    train(engine, "fp16", 1, "backward", range(2, STEPS))
    found, right = engine.module.weight.detach().double(), exactly(start, 1)
    scale = getattr(engine.optimizer, "loss_scale_config", engine.optimizer).cur_scale
    return [float((found - right).norm() / (right - start).norm()), scale]


def start() -> None:
    """Start the process group; nothing is compiled, which takes most of the time."""
    from deepspeed import get_accelerator

    muon.start()
    # DeepSpeed refuses fp16 on a CPU, on which torch computes in it.
    get_accelerator().is_fp16_supported = lambda: True
    get_accelerator().supported_dtypes = lambda: [*DTYPES.values()]


def main() -> None:
    parser = states.parser()
    parser.add_argument("--more", action="store_true")
    parser.add_argument("--beside", help="another patch, which is applied in each state")
    parser.add_argument("patch")
    parser.add_argument("cases", nargs="*", metavar="CASE")
    options = parser.parse_args()
    start()
    folder, numbers = Path(states.folder()), iter(range(3))

    def observe() -> dict[str, Any]:
        with applied(options.beside) if options.beside else contextlib.nullcontext():
            found: dict[str, Any] = {case: outcome(**CASES[case]) for case in options.cases}
        if options.more:
            number = next(numbers)
            resumed(folder / str(number), True)
            found["resumed"] = {of: resumed(folder / str(of), False) for of in range(number + 1)}
        return found

    states.report(options.patch, observe, options.out)
