"""What a fork server loads, one function per level (forkserver.py); no framework function runs, no group is made."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
import time
from types import ModuleType
from typing import Any

from rlhf_patches.definitions import registry
from rlhf_patches.engine import reached
from tests.harness import absent_packages, framework_entries


def torch() -> None:
    """torch with one thread, and the engine, which has applied nothing."""
    import torch

    importlib.import_module("torch.distributed")
    importlib.import_module("rlhf_patches.patches._vocab_parallel.upstream")
    importlib.import_module("rlhf_patches.api")
    registry.load()
    ask_strictly()
    importlib.import_module("pytest")  # some workers use its MonkeyPatch
    torch.set_num_threads(1)


def ask_strictly() -> None:
    """A condition that cannot be told of a real framework's call raises, which users' runs leave at a debug line."""
    real = reached._Asked.__call__

    def ask(self: Any, *arguments: Any) -> None:
        if self._probe.predicate is not None:
            self._probe.predicate(*arguments)
        real(self, *arguments)

    reached._Asked.__call__ = ask  # type: ignore[method-assign]


def packages() -> None:
    """What most frameworks import besides torch."""
    for module in (
        *("accelerate", "datasets", "peft", "transformers.models.qwen2.modeling_qwen2", "transformers.trainer"),
        *("ray", "omegaconf", "pydantic", "tensordict", "torch.utils.tensorboard"),
        *("torch._inductor.compile_fx", "torch.distributed.checkpoint", "torch.distributed.fsdp"),
    ):
        importlib.import_module(module)


def packages_beside_deepspeed() -> None:
    """The same where collectives are counted, before DeepSpeed is imported, and where PEFT may be another release."""
    os.environ.update(
        DS_ACCELERATOR="cpu", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false"
    )
    for module in (
        *("accelerate", "transformers.models.qwen2.modeling_qwen2", "pydantic"),
        *("torch._inductor.compile_fx", "torch.distributed.checkpoint", "torch.distributed.fsdp"),
    ):
        importlib.import_module(module)


def vllm() -> None:
    """vLLM, whose engine a worker starts."""
    from tests.harness import vllm_on_cpu

    os.environ.update(vllm_on_cpu.SETTINGS)
    for module in ("vllm", "vllm.v1.worker.cpu_worker", "accelerate", "peft", "transformers.trainer"):
        importlib.import_module(module)
    vllm_on_cpu.keep_weights()


def trl_vllm_serve() -> None:
    """TRL's server, on `vllm`, which has one name elsewhere by now; old ones need trl-optional-packages here."""
    import vllm.utils
    from vllm.utils import network_utils

    import rlhf_patches

    vllm.utils.get_open_port = network_utils.get_open_port
    rlhf_patches.apply(only="trl-optional-packages")
    importlib.import_module("trl.scripts.vllm_serve")


def trl_with_its_server() -> None:
    """The same, and trainers that ask it."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    trl_vllm_serve()
    for module in (
        *("datasets", "transformers.models.qwen2.modeling_qwen2", "trl.trainer.grpo_trainer"),
        "trl.experimental.online_dpo.online_dpo_trainer",
    ):
        importlib.import_module(module)


def megatron() -> None:
    """megatron-core on the CPU, its collectives counted."""
    from tests.harness import rollout_training

    rollout_training.on_cpu()
    for module in (
        *absent_packages.MEGATRON_CORE_IN_USE,
        "megatron.core.tensor_parallel.random",
        "megatron.core.transformer.transformer_config",
    ):
        importlib.import_module(module)


def megatron_module() -> None:
    """A megatron-core before 0.11, as far as its modules."""
    from tests.harness import megatron_on_cpu

    megatron_on_cpu.install()
    importlib.import_module("megatron.core.transformer.module")


def verl_trainer() -> None:
    """On megatron-core, verl's entry into training."""
    framework_entries.function("verl")


def swift_trainer() -> None:
    """On megatron-core, ms-swift's Megatron trainer."""
    framework_entries.function("swift")


def megatron_bridge_trainer() -> None:
    """On megatron-core, Megatron-Bridge's entry into training."""
    framework_entries.function("megatron_bridge")


def verl() -> None:
    """verl's functions for the logits, and those of its actor and its engine that there are."""
    absent_packages.install((*absent_packages.STAND_INS, *absent_packages.ON_REQUEST))
    importlib.import_module("tests.harness.small_gpt")
    for module in (
        *("verl.utils.megatron.tensor_parallel", "verl.workers.actor.megatron_actor"),
        *("verl.workers.engine.megatron.transformer_impl", "verl.workers.utils.losses"),
    ):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)


def verl_distillation() -> None:
    """On the above, verl's loss for distillation."""
    importlib.import_module("verl.trainer.distillation.losses")


def verl_critic() -> None:
    """On the above, verl's engine for FSDP, and what a small critic is made of."""
    for module in (
        *("verl.workers.engine.fsdp.transformer_impl", "torch.distributed.fsdp"),
        "transformers.models.qwen2.modeling_qwen2",
    ):
        importlib.import_module(module)


def verl_engine() -> None:
    """verl's side of vLLM, in the server's process and in the engine's, without vLLM."""
    absent_packages.install(absent_packages.ENGINES)
    importlib.import_module("verl.workers.rollout.vllm_rollout.vllm_async_server")


def verl_agent_loop() -> None:
    """On `verl_engine`, verl's conversations with tools."""
    importlib.import_module("verl.experimental.agent_loop.tool_agent_loop")


def verl_driver() -> None:
    """On `verl_engine`, verl's trainers in the driver's process, and the engine for FSDP."""
    for module in (
        *("verl.trainer.ppo.ray_trainer", "verl.trainer.ppo.v1.trainer_sync", "verl.trainer.ppo.v1"),
        *("verl.workers.engine.fsdp.transformer_impl", "peft"),
    ):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)


def verl_worker() -> None:
    """On the above, verl's worker of a policy, and hydra, which makes its configuration. 0.4 has other workers."""
    for module in ("verl.workers.engine_workers", "hydra"):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)


def verl_v1_trainer() -> None:
    """On the above, verl's default trainer since 0.9, and what writes its batches; 0.8 has it in one module."""
    absent_packages.install(absent_packages.ENGINES)
    for module in ("ppo.v1.trainer_base", "ppo.v1.agent_loop_tq", "main_ppo_sync"):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(f"verl.trainer.{module}")


def verl_sft() -> None:
    """On `verl_critic`, verl's trainers for supervised fine-tuning; 0.6 and 0.7.0 import what loads images."""
    images: Any = sys.modules.setdefault("qwen_vl_utils", ModuleType("qwen_vl_utils"))
    images.fetch_image = images.fetch_video = None
    for module in ("sft_trainer", "sft_trainer_ray", "fsdp_sft_trainer", "ppo.ray_trainer", "main_ppo_sync"):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(f"verl.trainer.{module}")


def megatron_bridge() -> None:
    """On megatron-core, Megatron-Bridge's models."""
    absent_packages.install()
    importlib.import_module("megatron.bridge.models")


def skyrl() -> None:
    """SkyRL's Megatron modules."""
    from tests.harness import skyrl_on_cpu

    skyrl_on_cpu.install()
    skyrl_on_cpu.model_utils()


def skyrl_dispatch() -> None:
    """SkyRL's controller, without Megatron, and Ray."""
    from tests.harness import skyrl_on_cpu

    importlib.import_module("ray")
    skyrl_on_cpu.install()
    skyrl_on_cpu.worker_dispatch()


def skyrl_workers() -> None:
    """On SkyRL's Megatron modules, its workers."""
    from tests.harness import skyrl_on_cpu

    skyrl_on_cpu.megatron_worker()


def skyrl_trainer() -> None:
    """SkyRL's trainer, without workers."""
    from tests.harness import skyrl_on_cpu

    skyrl_on_cpu.install()
    skyrl_on_cpu.trainer()


def torchdata() -> None:
    """The loaders of SkyRL's and verl's trainers."""
    importlib.import_module("torchdata.stateful_dataloader")


def skyrl_inference() -> None:
    """Where SkyRL starts engines, without vLLM."""
    from tests.harness import skyrl_on_cpu

    importlib.import_module("ray")
    skyrl_on_cpu.install()
    skyrl_on_cpu.inference()


def swift_kto() -> None:
    """ms-swift 3's KTO trainer."""
    importlib.import_module("tests.patches.swift.kto_sequence_parallel_ranks")


def swift_megatron() -> None:
    """ms-swift's Megatron trainers."""
    from tests.patches.swift import null_ref_context_ranks

    null_ref_context_ranks.load_megatron()
    for module in ("dpo_trainer", "gkd_trainer", "grpo_trainer"):
        with contextlib.suppress(ModuleNotFoundError):  # before 3.12 not there, and with vLLM only
            importlib.import_module(f"swift.megatron.trainers.{module}")


def swift_megatron_rollouts() -> None:
    """The same, with a stand-in for vLLM, without which GRPO's cannot be imported before 4.0."""
    from tests.harness import megatron_on_cpu, vllm_for_swift

    megatron_on_cpu.install()
    absent_packages.install_for_swift()
    vllm_for_swift.install()
    swift_megatron()


def swift_transformers() -> None:
    """ms-swift's other trainers, which each release has in another place."""
    from tests.harness import megatron_on_cpu

    megatron_on_cpu.install()
    absent_packages.install_for_swift()
    importlib.import_module("tests.patches.swift.null_ref_context_ranks")
    for module in (
        *("swift.rlhf_trainers.dpo_trainer", "swift.rlhf_trainers.grpo_trainer"),
        "swift.trainers.rlhf_trainer.grpo_trainer",
    ):
        with contextlib.suppress(ModuleNotFoundError, AssertionError):  # 3.8 asserts a package that GRPO's rewards want
            importlib.import_module(module)


def swift_engine() -> None:
    """ms-swift's engine for rollouts, with a stand-in for vLLM."""
    from tests.harness import megatron_on_cpu, vllm_for_swift

    megatron_on_cpu.install()
    absent_packages.install_for_swift()
    vllm_for_swift.install()
    importlib.import_module("tests.patches.swift.async_rollout_lora_ranks").engine_class()


def trl() -> None:
    """TRL and DeepSpeed, whose collectives are counted."""
    from tests.harness import zero3_on_cpu

    zero3_on_cpu.communication()
    for module in (
        *("accelerate", "deepspeed", "datasets", "peft", "tokenizers", "transformers.models.qwen2.modeling_qwen2"),
        *("trl.trainer.sft_trainer", "torch.distributed.fsdp"),
    ):
        importlib.import_module(module)


def trl_grpo() -> None:
    """TRL's GRPO trainer."""
    importlib.import_module("trl.trainer.grpo_trainer")
    deepspeed_where_it_is()


def transformers_trainer() -> None:
    """transformers' Trainer, PEFT and DeepSpeed, whose collectives are counted."""
    from tests.harness import zero3_on_cpu

    zero3_on_cpu.communication()
    for module in (
        "accelerate",
        "deepspeed",
        "peft",
        "transformers.models.qwen2.modeling_qwen2",
        "transformers.trainer",
    ):
        importlib.import_module(module)


def packages_below_transformers() -> None:
    """Of what any release of transformers imports, what takes longest; and what it does without is not there."""
    for name in ("datasets", "deepspeed", "pandas", "peft", "sklearn", "trl"):
        sys.modules[name] = None  # type: ignore[assignment]
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false")
    for name in ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.utils.checkpoint"):
        importlib.import_module(name)


def transformers_alone() -> None:
    """Of TRL's dependencies what takes longest, for a release of TRL that the worker imports by itself."""
    os.environ.update(
        DS_ACCELERATOR="cpu", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false"
    )
    for module in ("datasets", "tokenizers", "transformers.models.qwen2.modeling_qwen2", "transformers.trainer"):
        importlib.import_module(module)


def deepspeed_where_it_is() -> None:
    """As accelerate imports it when it is given a model; DeepSpeed compiles functions, and that loads inductor."""
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("deepspeed")


def trl_kto_with_liger() -> None:
    """A release of TRL with Liger's losses, on `torch_and_interpreter`, which has no device to choose kernels for."""
    from types import SimpleNamespace

    transformers_alone()
    driver = importlib.import_module("triton.runtime.driver").driver
    driver.set_active(SimpleNamespace(get_benchmarker=lambda: None))
    for module in ("peft", "trl.trainer.kto_trainer"):
        importlib.import_module(module)


def trl_dpo() -> None:
    """TRL's DPO trainer, without DeepSpeed."""
    for module in ("tokenizers", "transformers.models.qwen2.modeling_qwen2", "trl.trainer.dpo_trainer"):
        importlib.import_module(module)


def accelerate() -> None:
    """accelerate alone."""
    for module in ("accelerate", "torch.distributed.fsdp", "torch.distributed.tensor"):
        importlib.import_module(module)


def accelerate_and_bitsandbytes() -> None:
    """Both."""
    accelerate()
    importlib.import_module("bitsandbytes")


def deepspeed() -> None:
    """DeepSpeed alone."""
    importlib.import_module("rlhf_patches.patches.deepspeed.proofs.on_cpu")
    importlib.import_module("deepspeed")


def openrlhf() -> None:
    """OpenRLHF's models and losses, on DeepSpeed."""
    deepspeed()
    for module in ("transformers", "peft"):  # they look for flash-attention, and do not find it
        importlib.import_module(module)
    absent_packages.install(("flash_attn", "aiohttp"))
    importlib.import_module("openrlhf.models.loss")


def openrlhf_trainers() -> None:
    """On OpenRLHF's models, its trainers of the actor and the critic, for text."""
    absent_packages.install(("torchdata", "vllm"))
    images = "openrlhf.utils.vlm_utils"  # imports PIL
    sys.modules[images] = ModuleType(images)
    sys.modules[images].merge_mm_train_inputs = None  # type: ignore[attr-defined]
    for name in ("actor", "critic"):
        importlib.import_module(f"openrlhf.trainer.ray.ppo_{name}")


def peft() -> None:
    """PEFT."""
    importlib.import_module("peft")


def math_verify() -> None:
    """Math-Verify alone."""
    importlib.import_module("math_verify")


def rewards() -> None:
    """What uses Math-Verify: verl's reward loop and TRL's rewards."""
    for module in (
        *("verl.experimental.reward_loop.reward_manager.naive", "verl.utils.reward_score.math_verify"),
        "trl.rewards",
    ):
        importlib.import_module(module)


def trainer() -> None:
    """transformers' trainer, and TRL's SFT on it."""
    for name in ("transformers.trainer", "peft", "trl.trainer.sft_trainer"):
        importlib.import_module(name)
    deepspeed_where_it_is()


def torch_and_interpreter() -> None:
    """The same, where Triton will interpret its kernels: it looks at the variable when torch imports it."""
    os.environ["TRITON_INTERPRET"] = "1"
    torch()


def transformer_engine() -> None:
    """TransformerEngine's fused cross-entropy, interpreted."""
    from tests.harness import transformer_engine_on_cpu

    transformer_engine_on_cpu.install()


def megatron_with_transformer_engine() -> None:
    """megatron-core that has found TransformerEngine, whose layers have parameters and compute nothing."""
    from tests.harness import megatron_on_cpu, transformer_engine_on_cpu

    megatron_on_cpu.install()
    transformer_engine_on_cpu.install_modules()
    for module in ("megatron.core.extensions.transformer_engine", *absent_packages.MEGATRON_CORE_IN_USE):
        importlib.import_module(module)


def mcore_bridge_adapters() -> None:
    """On the above, LoRA of mcore-bridge."""
    importlib.import_module("mcore_bridge.tuners.lora")


def a_thread() -> None:
    """For the test of what happens then."""
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
