"""Windows of several micro-batches with models that are sharded or compiled, two ranks: ``--out FOLDER CASE``.

Each case as released and with transformers-accumulation-scale and transformers-moe-aux-loss; beside it, in float64, the
same steps from the losses' definitions.
"""

from __future__ import annotations

import contextlib
import gc
import json
import tempfile
from dataclasses import replace
from typing import Any

import torch
import transformers
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

import rlhf_patches
from rlhf_patches.patches.transformers.proofs import accumulation_scale_ranks as small
from rlhf_patches.patches.transformers.proofs.accumulation_scale_ranks import Case
from rlhf_patches.proving import states
from tests.patches.transformers import accumulation_scale_ranks as more

PLAIN = {"sync_module_states": "false", "cpu_ram_efficient_loading": "false", "use_orig_params": "true"}
FSDP1 = {"fsdp": True, "fsdp_config": {**PLAIN, "version": 1}}
FSDP2 = {"fsdp": True, "fsdp_config": {"version": 2, "cpu_ram_efficient_loading": "false"}}
COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}


def step(case: Case) -> dict[str, Any]:
    """Two windows, on what accelerate takes for accelerators where it shards: it does so on these only."""
    AcceleratorState._reset_state(reset_partial_state=True)
    torch._dynamo.reset()
    if "fsdp" in case.arguments:
        PartialState(cpu=True, backend="gloo")
        PartialState._shared_state.update(distributed_type=DistributedType.MULTI_GPU, device=torch.device("cpu"))
        case = replace(
            case,
            arguments={
                **case.arguments,
                "use_cpu": False,
                "accelerator_config": {"use_configured_state": True},
            },
        )
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
        model = case.made()
        start = {name: one.detach().clone() for name, one in model.named_parameters()}
        trainer = small.InOrder(model=model, args=small.arguments_of(case, folder), train_dataset=case.rows())
        trainer.train()
        end = whole(model, trainer.model_wrapped)
    AcceleratorState._reset_state(reset_partial_state=True)
    return {
        "logged": [each["loss"] for each in trainer.state.log_history if "loss" in each],
        **against(case, start, end),
    }


def whole(model: torch.nn.Module, wrapped: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All that is trained, under its own names."""
    with contextlib.ExitStack() as stack:
        if isinstance(wrapped, FullyShardedDataParallel):
            stack.enter_context(FullyShardedDataParallel.summon_full_params(wrapped))
        named = {name.replace("_fsdp_wrapped_module.", ""): one.detach() for name, one in model.named_parameters()}
        return {name: (one.full_tensor() if isinstance(one, DTensor) else one).clone() for name, one in named.items()}


def against(case: Case, start: dict[str, torch.Tensor], end: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What has changed, and should have."""
    _, losses, weights = small.wanted(case)
    change = {name: end[name].double() - start[name].double() for name in weights}
    right = {name: one - start[name].double() for name, one in weights.items()}
    return {"wanted": losses, "change": small.compared(change, right)}


def main() -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="+", metavar="CASE")
    options = parser.parse_args()
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True  # these CPUs do as well
    names = [name for each in options.cases for name in CASES if each in (name, name.partition(":")[0])]
    gc.freeze()
    found: dict[str, Any] = {"before": {name: step(CASES[name]) for name in names}}
    report = rlhf_patches.apply(only=(small.NAME, small.ROUTERS))
    found["status"] = {name: report[name].status.value for name in (small.NAME, small.ROUTERS)}
    found["after"] = {name: step(CASES[name]) for name in names}
    (options.out / f"rank{small.RANK}.json").write_text(json.dumps(found, indent=1))


def learning(kind: small.Kind, arguments: dict[str, Any]) -> Case:
    return Case(kind, 3, 5, rate=0.1, arguments=arguments)


KINDS = {
    "T5": small.T5,
    "BERT classifier": more.CLASSIFIER,
    "Llama classifier": small.LLAMA_CLASSIFIER,
    "Llama regression": more.REGRESSION,
    "Llama": more.CAUSAL,
    "Mixtral": more.MIXTURE,
}
WRAPPERS = {
    "FSDP1": FSDP1,
    "FSDP1 bf16": {**FSDP1, **more.BFLOAT16},
    "FSDP2": FSDP2,
    "FSDP2 bf16": {**FSDP2, **more.BFLOAT16},
    "compiled": COMPILED,
}
CASES = {
    f"{how}: {name}": learning(kind, arguments)
    for how, arguments in WRAPPERS.items()
    for name, kind in KINDS.items()
    if not (name == "T5" and "FSDP2" in how)  # whose tied weights accelerate does not shard
}
