"""Runs of a GPT that are saved, and resumed in another optimizer, with each of Megatron's: ``--out FOLDER``, gloo.

Each case before apply() of megatron-core-resume-groups and after it, and the first one after revert().
"""

from __future__ import annotations

import io
import zlib
from typing import Any

import torch

from rlhf_patches.proving import states
from tests.harness import rollout_training as harness

harness.on_cpu()

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module

NAME = "megatron-core-resume-groups"
STEPS = 1
DECOUPLED = {"lr": 1e-4, "min_lr": 1e-5, "decoupled_lr": 1e-2, "decoupled_min_lr": 1e-3}
"""All else, and embedding and output layer."""
RAISED = {"lr": 1e-2, "min_lr": 1e-3, "decoupled_lr": 1.0, "decoupled_min_lr": 0.1}
"""By their own ratio: all else has what the others were saved with."""
ONE = {"lr": 1e-4, "min_lr": 1e-5}
CASES: dict[str, tuple[str, dict[str, float], dict[str, float]]] = {
    "distributed": ("distributed", DECOUPLED, DECOUPLED),
    "bf16": ("bf16", DECOUPLED, DECOUPLED),
    "fp32": ("fp32", DECOUPLED, DECOUPLED),
    "distributed, one rate": ("distributed", ONE, ONE),
    "bf16, one rate": ("bf16", ONE, ONE),
    "distributed, both changed": ("distributed", DECOUPLED, {**DECOUPLED, "lr": 2e-4, "decoupled_lr": 2e-2}),
    "distributed, one changed": ("distributed", DECOUPLED, {**DECOUPLED, "lr": 2e-2}),
    "distributed, raised": ("distributed", DECOUPLED, RAISED),
    "bf16, raised": ("bf16", DECOUPLED, RAISED),
}


class Run:
    """A model, its optimizer and its scheduler, from the same weights every time."""

    def __init__(self, kind: str, rates: dict[str, float]) -> None:
        self.kind = kind
        half = {"bf16": True, "params_dtype": torch.bfloat16} if kind == "bf16" else {}
        config = harness.make_config()
        config.num_layers = 1
        for name, value in half.items():
            setattr(config, name, value)
        gpt = harness.make_gpt(config, 1)
        self.model = DistributedDataParallel(
            config=config,
            ddp_config=DistributedDataParallelConfig(use_distributed_optimizer=kind == "distributed"),
            module=Float16Module(config, gpt) if half else gpt,
        )
        settings = OptimizerConfig(
            optimizer="adam", weight_decay=0.01, use_distributed_optimizer=kind == "distributed", **half, **rates
        )
        self.optimizer = get_megatron_optimizer(settings, [self.model])
        self.scheduler = OptimizerParamScheduler(
            self.optimizer, 0.0, rates["lr"], rates["min_lr"], 0, 8, "linear", 0.01, 0.01, 0, "constant"
        )

    def steps(self, first: int) -> None:
        for step in range(first, first + STEPS):
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            batch = harness.make_batch(1, torch.distributed.get_rank(), step, 0)
            harness.loss_of("actor", harness.forward(self.model, batch).float(), batch).backward()
            finalize_model_grads([self.model])
            self.optimizer.step()
            self.scheduler.step(1)

    @property
    def rates(self) -> list[list[float]]:
        names = ("max_lr", "min_lr", "lr", "wd_mult")
        return [[group[name] for name in names] for group in self.optimizer.param_groups]

    @property
    def weights(self) -> dict[str, str]:
        return {name: found.detach().double().sum().item().hex() for name, found in self.model.named_parameters()}

    def saved(self) -> bytes:
        """What a checkpoint holds of this rank."""
        file = io.BytesIO()
        parts = [one.state_dict() for one in (self.model, self.optimizer, self.scheduler)]
        torch.save([*parts, self.moments if self.kind == "distributed" else None], file)
        return file.getvalue()

    def load(self, saved: bytes) -> None:
        model, optimizer, scheduler, moments = torch.load(io.BytesIO(saved), weights_only=False)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        # Megatron's own way to load them asks for a step, which only Apex and TransformerEngine do not keep with them.
        for mine, theirs in zip(self.moments, moments or (), strict=moments is not None):
            mine.update(theirs)
        self.scheduler.load_state_dict(scheduler)

    @property
    def moments(self) -> list[dict[str, Any]]:
        """Of the shards of this rank."""
        inner = self.optimizer.optimizer
        return [inner.state[one] for group in inner.param_groups for one in group["params"]]


def resumed(kind: str, before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
    """Rates and weights of a run that goes on, and of one that goes on in its place."""
    first = Run(kind, before)
    first.steps(0)
    checkpoint = first.saved()
    found: dict[str, Any] = {"saved": first.rates, "file": zlib.crc32(checkpoint)}
    first.steps(STEPS)
    second = Run(kind, after)
    try:
        second.load(checkpoint)
    except (KeyError, ValueError) as error:
        return found | {"raised": str(error)}
    found["loaded"] = second.rates
    second.steps(STEPS)
    wanted, weights = first.weights, second.weights
    return found | {
        "wrong": sorted(name for name in wanted if weights[name] != wanted[name]),
        "weights": weights,
    }


def main() -> None:
    out = states.parser().parse_args().out
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    states.report_cases(NAME, lambda names: {name: resumed(*CASES[name]) for name in names}, CASES, out)
