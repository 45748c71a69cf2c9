"""A GPT whose optimizer was built before its weights were loaded, with Megatron's CPU offload: ``--out FOLDER``, gloo.

Each case before apply() of megatron-core-offloaded-weights and after it, and the first one after revert(). What is on
the CPU already stands for the GPU, but for what Megatron has put into pinned memory.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rlhf_patches.proving import states
from tests.harness import rollout_training as harness

harness.on_cpu()

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module

NAME = "megatron-core-offloaded-weights"
RATE, DECAY, EPSILON = 1e-2, 0.1, 1e-8
CASES: dict[str, dict[str, Any]] = {
    "bf16": {"half": True},
    "bf16, half of it": {"half": True, "fraction": 0.5},
    "bf16, overlapped": {"half": True, "overlap": True},
    "precision-aware": {"half": True, "aware": True},
    "bf16, not offloaded": {"half": True, "fraction": None},
    "fp32, not offloaded": {"fraction": None},
}
_IS_CUDA = torch.Tensor.is_cuda.__get__
_KEEPS = (torch.Tensor.detach, torch.Tensor.clone, torch.Tensor.float)


class _Pinned(TorchFunctionMode):
    """All tensors are CUDA's, but for those in pinned memory and their copies."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _IS_CUDA:
            return not hasattr(args[0], "pinned")
        if func is torch.Tensor.pin_memory:
            args[0].pinned = True
            return args[0]
        result = func(*args, **(kwargs or {}))
        if func in _KEEPS and hasattr(args[0], "pinned"):
            result.pinned = True
        return result


def _nothing(*arguments: Any) -> None:
    """On one device there is no other stream to wait for."""


def _stream() -> Any:
    event = types.SimpleNamespace(wait=_nothing, synchronize=_nothing)
    return types.SimpleNamespace(wait_stream=_nothing, record_event=lambda: event)


class Run:
    """A model with weights of ``seed``, and its optimizer."""

    def __init__(
        self,
        seed: int,
        *,
        half: bool = False,
        fraction: float | None = 1.0,
        overlap: bool = False,
        aware: bool = False,
    ) -> None:
        precision: dict[str, Any] = {"bf16": True, "params_dtype": torch.bfloat16} if half else {}
        config = harness.make_config()
        config.num_layers = 1
        for name, value in precision.items():
            setattr(config, name, value)
        gpt = harness.make_gpt(config, seed)
        module = Float16Module(config, gpt) if half else gpt
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.randn(parameter.shape))
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
        self.model = DistributedDataParallel(config=config, ddp_config=ddp, module=module)
        settings = OptimizerConfig(
            optimizer="adam",
            lr=RATE,
            min_lr=RATE,
            weight_decay=DECAY,
            adam_eps=EPSILON,
            clip_grad=0.0,
            use_distributed_optimizer=True,
            optimizer_cpu_offload=fraction is not None,
            optimizer_offload_fraction=fraction or 0.0,
            overlap_cpu_optimizer_d2h_h2d=overlap,
            pin_cpu_grads=False,
            **precision,
        )
        settings.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = aware
        self.optimizer = get_megatron_optimizer(settings, [self.model])

    def step(self) -> dict[str, float]:
        """One step; how far each weight is from AdamW's first step in float64, of itself and in its own precision."""
        held = {name: one.detach().double().clone() for name, one in self.model.named_parameters()}
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        for number, parameter in enumerate(self.model.parameters()):
            torch.manual_seed(1000 + number)
            parameter.main_grad.copy_(torch.randn(parameter.shape))
        finalize_model_grads([self.model])
        gradients = {name: torch.sign(_gradient(number, one)) for number, (name, one) in self.named()}
        self.optimizer.step()
        assert {group["weight_decay"] for group in self.optimizer.param_groups} == {DECAY}  # no scheduler has run
        errors = {}
        for _, (name, one) in self.named():
            wanted = held[name] * (1 - RATE * DECAY) - RATE * gradients[name]
            off = (one.detach().double() - wanted).abs() / wanted.abs().clamp_min(RATE)
            errors[name] = off.max().item()
        return errors

    def named(self) -> Any:
        return enumerate(self.model.named_parameters())

    def load(self, other: Run) -> None:
        """As after a checkpoint without optimizer state."""
        self.model.load_state_dict(other.model.state_dict())
        self.optimizer.reload_model_params()

    @property
    def weights(self) -> dict[str, str]:
        return {name: one.detach().double().sum().item().hex() for name, one in self.model.named_parameters()}


def _gradient(number: int, like: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(1000 + number)
    return torch.randn(like.shape).double()


def loaded(settings: dict[str, Any]) -> dict[str, Any]:
    """One step of a run that was built before its weights were loaded, and of one that was built with them."""
    wanted = Run(2, **settings)
    run = Run(1, **settings)
    run.load(wanted)
    errors = run.step()
    wanted.step()
    mine, theirs = run.weights, wanted.weights
    return {"errors": errors, "wrong": sorted(name for name in theirs if mine[name] != theirs[name]), "weights": mine}


def main() -> None:
    out = states.parser().parse_args().out
    torch.cuda.current_stream = torch.cuda.Stream = _stream
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    with _Pinned():
        states.report_cases(NAME, lambda names: {name: loaded(CASES[name]) for name in names}, CASES, out)
