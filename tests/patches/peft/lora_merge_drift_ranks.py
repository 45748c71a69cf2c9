"""LoRA adapters merged into a small model and unmerged: ``--out DIR``, with a release of PEFT on sys.path.

As the proof of peft-lora-merge-drift does it in bfloat16, in every other way, and where PEFT's own way is taken.
"""

from __future__ import annotations

import contextlib
import copy
import types
from typing import Any
from unittest import mock

import peft
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_patches.patches.peft.proofs import lora_merge_drift_ranks, small
from rlhf_patches.patches.peft.proofs.lora_merge_drift_ranks import (
    CYCLES,
    _base_weights,
    digest,
    linears,
    many_cycles,
    merge,
    observed,
    policy,
    train,
    trial,
)
from rlhf_patches.testing import untouched


class Operations(TorchDispatchMode):
    """What torch computes within the block: copies, too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*args, **kwargs or {})


def two_adapters() -> dict[str, Any]:
    """Merged at once, and one after the other."""
    model = policy()
    model.add_adapter("other", model.peft_config["default"])
    train(model, 1)
    layers = list(linears(model).values())
    with trial(model) as found:
        for _ in range(CYCLES // 2):
            merge(model, adapter_names=["default", "other"])
            model.unmerge_adapter()
            for layer in layers:
                layer.merge(adapter_names=["other"])
                layer.merge(adapter_names=["default"])
                layer.merge(adapter_names=["default"])  # a warning: it is merged already
            model.unmerge_adapter()
    return found


def transposed() -> dict[str, Any]:
    """A layer whose weight has the other order of dimensions, as GPT-2's."""
    from transformers.pytorch_utils import Conv1D

    base = small.Small().to(torch.bfloat16)
    base.up = Conv1D(2 * small.WIDTH, small.WIDTH).to(torch.bfloat16)
    base.down = Conv1D(small.WIDTH, 2 * small.WIDTH).to(torch.bfloat16)
    small.fill(base)
    config = LoraConfig(r=small.RANK, target_modules=["up", "down"], fan_in_fan_out=True)
    model = get_peft_model(base, config)
    with trial(model) as found:
        for step in range(CYCLES):
            train(model, step)
            model.merge_adapter()
            model.unmerge_adapter()
    return found


def by_trl() -> dict[str, Any]:
    """TRL's own weight synchronization, up to what it sends."""
    from trl.generation.vllm_generation import VLLMGeneration

    model = policy()
    sender = object.__new__(VLLMGeneration)
    sender.model = model
    sender._dist = types.SimpleNamespace(gather_params=lambda _: contextlib.nullcontext(), is_fsdp=False)
    original, sent = _base_weights(model), {}
    with trial(model) as found:
        for step in range(CYCLES):
            train(model, step)
            sent = {name: tensor.clone() for name, tensor in sender._iter_named_params()}
    found["sent"] = sorted(sent)
    found["sent another weight"] = not torch.equal(sent["up.weight"], original["up"])
    return found


def changed_in_between(what: str) -> dict[str, Any]:
    model = policy()
    with trial(model) as found:
        model.merge_adapter()
        for layer in linears(model).values():
            if what == "weight":
                layer.get_base_layer().weight.data[0, 0] += 1.0
            elif what == "adapter":
                layer.lora_B["default"].weight.data[0, 0] += 1.0
            elif what == "scaling":
                layer.scaling["default"] *= 2
            elif what == "dtype":
                layer.get_base_layer().to(torch.float16)
            elif what == "merged":
                layer.merged_adapters.append("another")
        model.unmerge_adapter()
        if what == "dtype":
            model.to(torch.bfloat16)
    return found


def once(**more: Any) -> dict[str, Any]:
    """With an adapter of another kind, or a base model of another dtype."""
    model = policy(**more)
    with trial(model) as found:
        model.merge_adapter()
        model.unmerge_adapter()
    return found


def a_shard() -> dict[str, Any]:
    """A DTensor, as FSDP2 has them."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    model = policy()
    for parent in linears(model).values():
        for module in (parent.base_layer, parent.lora_A["default"], parent.lora_B["default"]):
            shard = distribute_tensor(module.weight.data, mesh, [Replicate()])
            module.weight = torch.nn.Parameter(shard, requires_grad=module.weight.requires_grad)
    counted = observed()
    model.merge_adapter()
    model.unmerge_adapter()
    return {"digest": digest(model), "ways": {way: number - counted[way] for way, number in observed().items()}}


def a_copy_of_a_merged_model() -> dict[str, Any]:
    model = policy()
    model.merge_adapter()
    model = copy.deepcopy(model)
    with trial(model) as found:
        model.unmerge_adapter()
    return found


def merged_for_good() -> dict[str, Any]:
    """merge_and_unload: the same weights by the same operations, of a layer with an override of `merge` too."""
    from rlhf_patches.patches.peft import _base_weights

    class Derived(peft.tuners.lora.layer.Linear):
        def merge(self, *args: Any, **kwargs: Any) -> None:
            super().merge(*args, **kwargs)

    model = policy()
    linears(model)["up"].__class__ = Derived
    with Operations() as operations:
        merged = model.merge_and_unload()
    return {"digest": digest(merged), "kept": len(_base_weights._kept), "operations": operations.seen}


def a_broken_adapter() -> dict[str, Any]:
    """safe_merge finds it, and nothing is merged; the next merge is as ever."""
    model = policy()
    layer = linears(model)["up"]
    good = layer.lora_B["default"].weight.data.clone()
    raised = ""
    with trial(model) as found:
        layer.lora_B["default"].weight.data[0, 0] = float("nan")
        try:
            merge(model, safe_merge=True)
        except ValueError as error:
            raised = str(error)
        layer.lora_B["default"].weight.data.copy_(good)
        model.merge_adapter()
        model.unmerge_adapter()
    return {**found, "raised": raised}


def without_memory(when: str) -> dict[str, Any]:
    """torch's own error where a copy is made."""
    from rlhf_patches.patches.peft import _base_weights

    def raises(*_: Any) -> Any:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

    model = policy()
    with trial(model) as found:
        with mock.patch.object(_base_weights, "_Kept", raises) if when == "merging" else contextlib.nullcontext():
            model.merge_adapter()
        with mock.patch.object(_base_weights, "_merged", raises) if when == "unmerging" else contextlib.nullcontext():
            model.unmerge_adapter()
    return found


def touched() -> str | None:
    """What a merge and an unmerge have changed of a model and an optimizer, but for values."""
    model = policy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with untouched(model, optimizer):
            model.merge_adapter()
            model.unmerge_adapter()
    except AssertionError as error:
        return str(error)
    return None


def observe() -> dict[str, Any]:
    modern = int(peft.__version__.split(".")[1]) >= 16
    found = {
        "bfloat16": many_cycles(torch.bfloat16),
        "float16": many_cycles(torch.float16),
        "safe merge": many_cycles(torch.bfloat16, safe_merge=True),
        "two adapters": two_adapters(),
        "transposed": transposed(),
        **{f"changed: {what}": changed_in_between(what) for what in ("weight", "adapter", "scaling", "dtype")},
        "float32": once(dtype=torch.float32),
        "copied while merged": a_copy_of_a_merged_model(),
        "merged for good": merged_for_good(),
        "broken": a_broken_adapter(),
        **{f"no memory, {when}": without_memory(when) for when in ("merging", "unmerging")},
        "touched": touched(),
    }
    if modern:
        found["DoRA"] = once(use_dora=True)
        found["bias"] = once(lora_bias=True)
        found["shard"] = a_shard()
        from trl.generation.vllm_generation import VLLMGeneration

        if hasattr(VLLMGeneration, "_iter_named_params"):  # an older TRL beside it has another way
            found["by TRL"] = by_trl()
    return found


def main() -> None:
    lora_merge_drift_ranks.main(observe)
