"""One step of several micro-batches, by DeepSpeed and by the definition: ``--out FOLDER PATCH CASE ...``.

Pipelines on as many ranks as there are, as the proofs of deepspeed-pipeline-accumulation and
deepspeed-unscaled-accumulation have one, and the engine itself with and without `no_sync()`. The yardstick is float64
in one process: the mean over all micro-batches of all ranks.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from rlhf_patches.patches.deepspeed.proofs import accumulation_scale_ranks
from rlhf_patches.patches.deepspeed.proofs.accumulation_scale_ranks import Layer, data, exactly, loss_of, values, wrong


@dataclass(frozen=True)
class Case:
    """One configuration.

    Attributes:
        pipeline: the engine of `PipelineModule`, with `stages` of them; all ranks are stages if 0.
        tied: the first layer and the last one are the same.
        unsynced: of the engine itself: all micro-batches but the last one run in `no_sync()`.
        caller: the caller divides by the micro-batches, and says so with ``scale_wrt_gas=False``.
        named: of the engine itself: a subclass of the user's that has a name of its own ``is_last_stage``.
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
    named: bool = False


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
    "engine, user's own name": Case(pipeline=False, named=True),
}


def stages(case: Case) -> int:
    return case.stages or dist.get_world_size()


def numbers(case: Case) -> list[int]:
    """Of the layers, the same number for the same weights."""
    found = list(range(2 * stages(case)))
    return [*found[:-1], 0] if case.tied else found


def pipeline(case: Case) -> tuple[Any, dict[int, Any]]:
    """The module, and the layers of this rank by their numbers."""
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    specs = [
        TiedLayerSpec("tied", Layer, number, tied_weight_attr=["weight", "bias"])
        if case.tied and not number
        else LayerSpec(Layer, number)
        for number in numbers(case)
    ]
    module, layers = accumulation_scale_ranks.pipeline(specs, stages(case))
    if case.tied:
        layers |= {0: module.tied_modules["tied"]} if len(module.tied_modules) else {}
    return module, layers


def plain(case: Case) -> tuple[Any, dict[int, Any]]:
    """The same without pipelines."""
    module = torch.nn.Sequential(*(Layer(number) for number in numbers(case))).to(case.dtype)
    return module, dict(enumerate(module))


def step(case: Case, engine: Any, samples: torch.Tensor) -> None:
    """A step of the engine itself, with these micro-batches."""
    for number, (x, y) in enumerate(samples):
        last = number == case.micro_batches - 1
        with contextlib.nullcontext() if last or not case.unsynced else engine.no_sync():
            engine.set_gradient_accumulation_boundary(last)
            loss = loss_of(engine(x), y)
            if case.caller:
                engine.backward(loss / case.micro_batches, scale_wrt_gas=False)
            else:
                engine.backward(loss)
        if last or not case.unsynced:
            engine.step()


def outcome(case: Case) -> dict[str, Any]:
    """What is wrong of this rank's gradients and of the losses, as a part of what is right; and for "bit for bit"."""
    replicas = dist.get_world_size() // (stages(case) if case.pipeline else 1)
    samples = data(replicas, case.micro_batches, case.dtype)
    gradients, right_loss = exactly(numbers(case), samples)
    right_norm = math.sqrt(sum(float(each.square().sum()) for layer in gradients.values() for each in layer))
    module, layers = pipeline(case) if case.pipeline else plain(case)
    engine = accumulation_scale_ranks.engine(module, samples, case.stage, case.clip)
    if case.named:
        engine.__class__ = type("Own", (type(engine),), {"is_last_stage": lambda self: False})
    before = values(layers)
    found: dict[str, Any] = {}
    if case.pipeline:
        own = samples[engine.grid.get_data_parallel_id()]
        evaluated = engine.eval_batch(iter([tuple(each) for each in own]))
        loss = float(engine.train_batch(iter([tuple(each) for each in own])))
        found["losses off"] = max(abs(float(each) / right_loss - 1) for each in (evaluated, loss))
    else:
        step(case, engine, samples[dist.get_rank()])
    after = values(layers)
    norm = engine.get_global_grad_norm()
    found.update(
        wrong(before, after, gradients, min(1.0, case.clip / right_norm) if case.clip else 1.0),
        norm=None if norm is None else float(norm) / right_norm,
        bits=[float(each.sum()).hex() for layer in after.values() for each in layer],
        attributes=sorted(vars(engine)),
    )
    engine.destroy()
    return found


def main() -> None:
    accumulation_scale_ranks.main({name: partial(outcome, case) for name, case in CASES.items()})
