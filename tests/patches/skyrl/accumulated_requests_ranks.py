"""Two requests before an optimizer step, to SkyRL's real workers: ``--out FOLDER``, on one rank.

The workers are those of loss_outputs_packed_ranks.py, and so is a sample's loss. A request has one sample. The gradient
should be the sum of both.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.harness import megatron_on_cpu

torch.set_num_threads(1)
megatron_on_cpu.install()

from rlhf_patches.proving import states
from tests.harness import skyrl_on_cpu, small_gpt
from tests.patches.skyrl import loss_outputs_packed_ranks as workers

NAME = "skyrl-accumulated-requests"


configured = workers.configure


def configure(worker: Any, tokens: int) -> Any:
    worker = configured(worker, tokens)
    worker.cfg.use_sample_packing = False  # 0.1.0 and 0.2.0
    return worker


def made(backend: Any) -> Any:
    with mock.patch.object(workers, "configure", configure):
        worker, _ = backend(skyrl_on_cpu.megatron_worker(), -1)
    worker._micro_batches_accumulated, worker.record_memory = 0, False
    worker.optimizer = SimpleNamespace(param_groups=[{"lr": 0.0}])
    worker.scheduler = SimpleNamespace(get_last_lr=lambda: [0.0])
    return worker


def gradient(worker: Any) -> torch.Tensor:
    modules = getattr(worker, "actor_module", None) or [worker.model]
    found = [
        getattr(parameter, "main_grad", None) if parameter.grad is None else parameter.grad
        for module in modules
        for parameter in module.parameters()
    ]
    return torch.cat([each.double().flatten() for each in found if each is not None])


def of(backend: Any, *requests: int) -> torch.Tensor:
    """After these requests."""
    worker = made(backend)
    batch = workers.make_batch(0)
    for row in requests:
        one = batch[row : row + 1]
        one.metadata = dict(batch.metadata)
        worker.forward_backward(one)
    return gradient(worker)


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def observe() -> dict[str, Any]:
    report = {}
    for backend in (workers.fsdp, workers.megatron):
        first, second = of(backend, 0), of(backend, 1)
        both = of(backend, 0, 1)
        report[backend.__name__] = {"sum": off(both, first + second), "last": off(both, second)}
    return report


def main() -> None:
    from megatron.core import parallel_state

    options = states.parser().parse_args()
    small_gpt.VOCABULARY = workers.VOCABULARY
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    skyrl_on_cpu.install()
    skyrl_on_cpu.megatron_worker()
    skyrl_on_cpu.tinker_backend()
    states.report(NAME, observe, options.out)
