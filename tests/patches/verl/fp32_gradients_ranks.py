"""What gradients add up to in the buffers that verl has Megatron-Bridge make.

``--out FOLDER`` on two gloo ranks, with a release of verl on sys.path. Real are verl's ``make_megatron_module``,
Megatron-Bridge's ``provide_distributed_model`` with its configuration, and megatron-core's DistributedDataParallel.
Ours is the model, two layers; and for "by Bridge" the function that verl 0.8 and 0.9 ask of Megatron-Bridge 0.5, which
needs Python 3.12: it makes the configuration of the arguments, and nothing else.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf_patches.proving import states
from tests.harness import absent_packages, megatron_on_cpu

torch.set_num_threads(1)
megatron_on_cpu.install()
absent_packages.install()

from tests.harness import summed_gradients

NAME = "verl-fp32-gradients"
CASES: dict[str, dict[str, Any]] = {
    "by default": {},
    "all-reduce": {"use_distributed_optimizer": False},
    "another override": {"override": {"bucket_size": 100}, "micro_batches": 8},
    "bfloat16 asked for": {"override": {"grad_reduce_in_fp32": False}},
    "float32": {"bf16": False, "micro_batches": 4},
    "added up by each rank": {"override": {"param_name_patterns_for_fp32_local_accumulation": ("all",)}},
}

# What verl 0.8 imports of Megatron-Bridge 0.5 besides, for critics and adapters; what it calls here is for neither.
ABSENT = {
    "megatron.bridge.training.utils.train_utils": ("LinearForLastLayer", "freeze_moe_router", "make_value_model"),
    "megatron.bridge.peft.utils": ("create_peft_hook", "load_peft_adapter_checkpoint"),
}


def provider(bf16: bool) -> Any:
    from megatron.bridge.models.model_provider import ModelProviderMixin
    from megatron.core.transformer.transformer_config import TransformerConfig

    class Provider(ModelProviderMixin):
        sequence_parallel = fp16 = False
        virtual_pipeline_model_parallel_size = None

        def provide(self, pre_process: Any = None, post_process: Any = None, vp_stage: Any = None) -> Any:
            sizes = {"num_layers": 1, "hidden_size": summed_gradients.WIDTH, "num_attention_heads": 1}
            return summed_gradients.Layers(TransformerConfig(**sizes, bf16=bf16))

    found = Provider()
    found.bf16 = bf16
    return found


def newer(released: type) -> type:
    """Megatron-Bridge's configuration with what megatron-core has from 0.19 on, and refuses; it does nothing here."""

    @dataclass
    class Newer(released):
        param_name_patterns_for_fp32_local_accumulation: tuple[str, ...] = ()

        def finalize(self) -> None:
            super().finalize()
            assert not (self.param_name_patterns_for_fp32_local_accumulation and self.grad_reduce_in_fp32)

    return Newer


def by_bridge(
    wrap_with_ddp: bool, use_distributed_optimizer: bool, use_megatron_fsdp: bool, overrides: Any = None
) -> Any:
    """In place of Megatron-Bridge 0.5's."""
    config = importlib.import_module("megatron.bridge.training.config").DistributedDataParallelConfig
    made = config(**{"use_distributed_optimizer": use_distributed_optimizer, **(overrides or {})})
    made.finalize()
    return made if wrap_with_ddp else None


def step(
    *,
    micro_batches: int = 64,
    bf16: bool = True,
    use_distributed_optimizer: bool = True,
    override: dict[str, Any] | None = None,
) -> dict[str, Any]:
    module = importlib.import_module("verl.utils.megatron_utils")
    wrapped = module.McoreModuleWrapperConfig(use_distributed_optimizer=use_distributed_optimizer)
    given = None if override is None else dict(override)
    with summed_gradients.streams():
        (model,), _ = module.make_megatron_module(
            wrap_config=wrapped,
            tf_config=None,
            hf_config=SimpleNamespace(hidden_size=summed_gradients.WIDTH, rope_theta=10000.0),
            bridge=object(),
            provider=provider(bf16),
            override_ddp_config=given,
        )
    assert given == override
    return summed_gradients.added_up(model, micro_batches)


def observe(cases: list[str]) -> dict[str, Any]:
    config = importlib.import_module("megatron.bridge.training.config")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "DistributedDataParallelConfig", newer(config.DistributedDataParallelConfig))
        return each_way(cases)


def each_way(cases: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    utilities = importlib.import_module("megatron.bridge.training.utils.config_utils")
    names = importlib.import_module("verl.utils.megatron_utils").make_megatron_module.__code__.co_names
    if "DistributedDataParallelConfig" in names:
        found = {case: step(**CASES[case]) for case in cases}
    if "create_ddp_config" in names:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(utilities, "create_ddp_config", by_bridge, raising=False)
            for name, absent in ABSENT.items():
                for each in absent:
                    patch.setattr(importlib.import_module(name), each, lambda *_: None, raising=False)
            found |= {f"{case}, by Bridge": step(**CASES[case]) for case in cases}
    return found


def main() -> None:
    options = states.parser().parse_args()
    torch.distributed.init_process_group("gloo")
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    states.report_cases(NAME, observe, CASES, options.out)
