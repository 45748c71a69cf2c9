"""Rehearsals of Megatron-Bridge's training step: ``--out FOLDER CASE...``.

Real are ``train_step``, GPT's ``forward_step`` with its batches and loss, the functions that Megatron-Bridge gives
megatron-core, and megatron-core. Ours are the model, the rows, and the set-up.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from tests.harness import absent_packages, megatron_on_cpu

megatron_on_cpu.install()
absent_packages.install()

from megatron.core import num_microbatches_calculator as calculator
from megatron.core import parallel_state, rerun_state_machine
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection

from rlhf_patches.proving import states
from tests.harness import framework_entries, rehearsing, small_gpt

MICRO_BATCHES, ROWS, LENGTH = 3, 2, 8
CASES: dict[str, dict[str, Any]] = {
    "DP": {"calculate_per_token_loss": True},
    "DP, means": {},
    "DP, clears": {"calculate_per_token_loss": True},
    "TP": {"calculate_per_token_loss": True, "sequence_parallel": True},
}


class Timer(contextlib.AbstractContextManager[None]):
    """Stands for Megatron-Bridge's timers, which measure nothing here."""

    def __call__(self, *given: Any, **named: Any) -> Timer:
        return self

    def start(self, **named: Any) -> None:
        """Nothing."""

    def stop(self) -> None:
        """Nothing."""

    def __exit__(self, *_: object) -> None:
        """Nothing."""


def step(case: str) -> None:
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(2 if "TP" in case else 1)
    chunk = small_gpt.make_model(False, ddp={"use_distributed_optimizer": True}, **CASES[case])
    config, ranks = chunk.config, parallel_state.get_data_parallel_world_size()
    config.seq_length = LENGTH
    settings = OptimizerConfig(optimizer="adam", lr=1e-2, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(settings, [chunk])
    framework_entries.install_megatron_bridge([chunk], config, optimizer, chunk.ddp_config)
    calculator.destroy_num_microbatches_calculator()
    calculator.init_num_microbatches_calculator(0, None, MICRO_BATCHES * ROWS * ranks, ROWS, ranks)
    rerun_state_machine.destroy_rerun_state_machine()
    rerun_state_machine.initialize_rerun_state_machine(mode=rerun_state_machine.RerunMode.VALIDATE_RESULTS)
    state = SimpleNamespace(timers=Timer(), straggler_timer=Timer(), cfg=configuration(config, settings, ranks))
    own = importlib.import_module("megatron.bridge.training.gpt_step").forward_step

    def forward_step(iterator: Any, model: Any) -> Any:
        if "clears" in case:
            model.zero_grad_buffer()
        return own(state, iterator, model)

    importlib.import_module("megatron.bridge.training.train").train_step(
        forward_step,
        rerun_state_machine.RerunDataIterator(rows()),
        [chunk],
        optimizer,
        None,
        state,
        ProcessGroupCollection.use_mpu_process_groups(),
        get_forward_backward_func(),
    )


def configuration(config: Any, settings: Any, ranks: int) -> SimpleNamespace:
    return SimpleNamespace(
        model=config,
        optimizer=settings,
        data_parallel_size=ranks,
        train=SimpleNamespace(micro_batch_size=ROWS, empty_unused_memory_level=0),
        ddp=SimpleNamespace(overlap_param_gather=False),
        dataset=SimpleNamespace(dataloader_type="cyclic"),
        dist=SimpleNamespace(use_decentralized_pg=False),
        rerun_state_machine=SimpleNamespace(check_for_nan_in_loss=True, check_for_spiky_loss=True),
    )


def rows() -> Iterator[dict[str, Any]]:
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    while True:
        tokens = torch.randint(small_gpt.VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
        positions = torch.arange(LENGTH).expand(ROWS, LENGTH)
        loss_mask = (torch.rand(ROWS, LENGTH, generator=generator) < 0.6).float()
        yield {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": loss_mask, "position_ids": positions}


def rehearsed(case: str, out: Any) -> Any:
    """The results that the command reads."""
    path = out / f"{case} {os.environ['RANK']}.json"
    with rehearsing.armed(path), contextlib.suppress(SystemExit):
        step(case)
    return rehearsing.results(path)


def main() -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="+")
    options = parser.parse_args()
    torch.compiler.set_stance("force_eager")
    torch.distributed.init_process_group("gloo")
    found = {case: rehearsed(case, options.out) for case in options.cases}
    (options.out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
