"""A step on a long sequence through accelerate's FSDP, on one CPU rank: ``--out FOLDER [CASE ...]``."""

from __future__ import annotations

import copy
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from accelerate.state import AcceleratorState
from packaging.version import Version
from torch.distributed.fsdp import MixedPrecision

from rlhf_patches.patches import _rotary_model
from rlhf_patches.proving import states

NAME = "accelerate-fsdp1-rotary-precision"
_BF16 = torch.bfloat16
BY_NAME = Version(accelerate.__version__) >= Version("1.9")  # before, a plugin does not take a policy's name
CASES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "policy by name": {"policy": "bf16"},
    "own policy": {"policy": MixedPrecision(param_dtype=_BF16, reduce_dtype=_BF16, buffer_dtype=_BF16)},
    "own dictionary": {"policy": {"param_dtype": _BF16, "reduce_dtype": _BF16, "buffer_dtype": _BF16}},
    "own code": {"remote": True},
    "own buffer": {"buffer": torch.float32},
    "own float64 buffer": {"buffer": torch.float64},
    "own float16 buffer": {"buffer": torch.float16},
    "no mixed precision": {"precision": "no"},
    "FSDP2": {"fsdp": 2},
    "reference": {"reference": True},  # of TRL
    "reference with own buffer": {"reference": True, "buffer": torch.float32},
    "after own buffer": {"after": True},
    "copied plugin": {"copied": True},
    "copied plugin, own buffer": {"copied": True, "buffer": torch.float32},
}


def made(case: dict[str, Any]) -> Any:
    """The model; some have a buffer that the forward pass multiplies by what parameters have computed."""
    model = _rotary_model.model(case.get("remote", False))
    if "buffer" in case:
        model.register_buffer("own", torch.eye(32, dtype=case["buffer"]), persistent=False)
        model.lm_head.register_forward_hook(lambda head, inputs, logits: logits @ model.own)
    return model


def prepared(model: torch.nn.Module, case: dict[str, Any]) -> tuple[Any, Any, Any]:
    """The accelerator and the model, as on GPUs: on CPU ranks accelerate never chooses FSDP.

    Also what TRL's reference model computes before the model is prepared, if there is one.
    """
    precision = case.get("precision", "bf16")
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    fsdp = case.get("fsdp", 1)
    own: dict[str, Any] = {"use_orig_params": True} if fsdp == 1 else {}
    if "policy" in case:
        own["mixed_precision_policy"] = case["policy"]
    name = own.pop("mixed_precision_policy") if own.get("mixed_precision_policy") == "bf16" and not BY_NAME else None
    plugin = FullyShardedDataParallelPlugin(fsdp_version=fsdp, cpu_ram_efficient_loading=False, **own)
    if name is not None:
        plugin.set_mixed_precision(name, override=True)
    if precision != "no":
        plugin.set_mixed_precision(precision)
    if case.get("copied"):
        plugin = copy.deepcopy(plugin)
    for state in (accelerator.state, PartialState()):  # FSDP1 does not take "cpu:0" for "cpu"
        state._shared_state.update(
            distributed_type=DistributedType.FSDP, fsdp_plugin=plugin, device=torch.device("cpu")
        )
    first = None
    if case.get("reference"):
        from trl.models.utils import prepare_fsdp

        with torch.no_grad():
            first = _rotary_model.log_probabilities(prepare_fsdp(made(case), accelerator))
    if case.get("after"):
        accelerator.prepare_model(made({"buffer": torch.float32}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return accelerator, accelerator.prepare(model, optimizer)[0], first


def outcome(case: dict[str, Any], exact: _rotary_model.Exact) -> dict[str, Any]:
    model = made(case)
    with states.heard() as messages:
        accelerator, wrapped, first = prepared(model, case)

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        accelerator.backward(loss)
        (found,) = (each.grad for name, each in wrapped.named_parameters() if name.endswith("embed_tokens.weight"))
        whole: torch.Tensor = found.full_tensor() if hasattr(found, "full_tensor") else found
        return whole.reshape(exact.gradient.shape)

    far = None
    if first is not None:
        with torch.no_grad():
            off = first - _rotary_model.log_probabilities(wrapped)
        far = float(off[_rotary_model.FAR :].abs().mean())
    return {
        "reference": far,
        **exact.compared(wrapped, gradient),
        "buffers": _rotary_model.kinds(wrapped),
        "messages": [each for each in messages if NAME in each],
    }


def main() -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="*", default=[*CASES])
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    exact = _rotary_model.Exact()
    states.report_cases(
        NAME,
        lambda cases: {case: outcome(CASES[case], exact) for case in cases},
        options.cases,
        options.out,
        reverted=options.cases,
    )
