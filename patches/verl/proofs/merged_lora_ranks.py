"""The weights of a small model with LoRA that verl's real FSDP engine sends to a rollout engine: ``--out FOLDER``.

Each case is compared with PEFT's own `merge_and_unload` in float64.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import types
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.distributed import fsdp
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from rlhf_patches.proving import states

torch.set_num_threads(1)
PATCH = "verl-merged-lora"


@dataclass(frozen=True)
class Case:
    """The engine's settings: FSDP's version, ``model.lora.merge``, and so on."""

    version: int = 2
    merge: bool = True
    lora: bool = True
    dtype: torch.dtype = torch.float32
    offload: bool = False
    taken: int | None = None
    """The number of tensors taken before the iterator is closed; None for all."""


CASES = {
    "merged": Case(),
    "in bfloat16": Case(dtype=torch.bfloat16),
    "with offload": Case(offload=True),
    "closed early": Case(taken=3),
    "fsdp1": Case(version=1),
    "adapters": Case(merge=False),
    "no LoRA": Case(lora=False),
}


def make_model(case: Case) -> Any:
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=2)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=32, num_hidden_layers=2, **sizes))
    if case.lora:
        # Not initialized to 0, like after some steps.
        settings = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(model, settings)
    return model.to(case.dtype)


def sharded(model: Any, version: int) -> Any:
    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    if version == 2:
        for module in model.modules():
            if isinstance(module, Qwen2DecoderLayer):
                fsdp.fully_shard(module, mesh=mesh)
        return fsdp.fully_shard(model, mesh=mesh)
    policy = fsdp.wrap.ModuleWrapPolicy({Qwen2DecoderLayer})
    made = fsdp.FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), use_orig_params=True, device_mesh=mesh, auto_wrap_policy=policy
    )
    # As verl's engine sets it.
    kind, config = fsdp.StateDictType.SHARDED_STATE_DICT, fsdp.ShardedStateDictConfig()
    if mesh.size() == 1:
        kind, config = fsdp.StateDictType.FULL_STATE_DICT, fsdp.FullStateDictConfig()
    fsdp.FullyShardedDataParallel.set_state_dict_type(made, kind, config)
    return made


def make_engine(case: Case, model: Any) -> Any:
    implementation = importlib.import_module("verl.workers.engine.fsdp.transformer_impl")
    utilities: Any = importlib.import_module("verl.utils.fsdp_utils")
    utilities.get_device_id = lambda: 0 if case.version == 1 else "cpu"  # FSDP1's device is f"cpu:{get_device_id()}"
    engine = object.__new__(implementation.FSDPEngineWithLMHead)
    engine.module = sharded(model, case.version)
    engine.model_config = types.SimpleNamespace(lora={"merge": case.merge}, hf_config=None)
    engine._is_offload_param, engine._qat_enabled, engine._uses_fsdp2_cpu_offload_policy = case.offload, False, False
    return engine


def bits(tensors: dict[str, torch.Tensor]) -> str:
    """A digest of all bits of all tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode() + tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def held(engine: Any) -> dict[str, torch.Tensor]:
    """This rank's part of every parameter."""
    return {
        name: (each.to_local() if hasattr(each, "to_local") else each).detach()
        for name, each in engine.module.named_parameters()
    }


def observe(case: Case) -> dict[str, Any]:
    """The largest relative distance of a tensor from the right one and from the base model's; and the final state."""
    model = make_model(case)
    exact, base = (copy.deepcopy(model).double() for _ in range(2))
    if case.lora:
        exact, base = exact.merge_and_unload(), base.unload()
    engine = make_engine(case, model)
    before, kinds = bits(held(engine)), [type(each).__name__ for each in engine.module.modules()]
    identities = [id(each) for each in engine.module.parameters()]
    tensors, settings = engine.get_per_tensor_param(base_sync_done=True)
    if case.taken is None:
        # Collected, as SGLang's sender does: yielded tensors must not change afterwards.
        taken = list(tensors)
    else:
        taken = [next(iter(tensors)) for _ in range(case.taken)]
        if hasattr(tensors, "close"):
            tensors.close()
    given = {name: tensor.detach() for name, tensor in taken}

    def distance(of: Any) -> float:
        right = of.state_dict()
        return max(
            (
                ((value.double() - right[name]).norm() / right[name].norm()).item()
                for name, value in given.items()
                if name in right
            ),
            default=-1.0,
        )

    return {
        "from merged": distance(exact),
        "from the base": distance(base),
        "names": sorted(given),
        "all names": sorted(exact.state_dict()),
        "bits": bits(given),
        "given by": getattr(tensors, "__name__", ""),
        "settings": settings and sorted(settings),
        "parameters stay": bits(held(engine)) == before,
        "modules stay": [type(each).__name__ for each in engine.module.modules()] == kinds,
        "identities stay": [id(each) for each in engine.module.parameters()] == identities,
        "merged afterwards": [name for name, each in engine.module.named_modules() if getattr(each, "merged", False)],
    }


def main() -> None:
    torch.distributed.init_process_group("gloo")
    torch.cpu.empty_cache = lambda: None  # CUDA's, which offload calls
    states.report(
        PATCH, lambda: {name: observe(case) for name, case in CASES.items()}, states.parser().parse_args().out
    )


if __name__ == "__main__":
    main()
