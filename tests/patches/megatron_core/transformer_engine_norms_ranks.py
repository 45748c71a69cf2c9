"""The norm of the gradient of TransformerEngine's layers, by megatron-core's optimizer.

``--out FOLDER --patch NAME CASE...`` on two ranks; a case is a layout, or ``LAYOUT, distributed``. The first one is
also observed after revert(). TransformerEngine's layers are real, but cannot be called here: gradients are set, to
numbers that any rank can make. Each reports the norm, that of the whole model in float64, and how far a clipped step is
from what it should have been.
"""

from __future__ import annotations

import contextlib
import zlib
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.extensions import transformer_engine
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from rlhf_patches.proving import states

HIDDEN, EXPERTS, RATE, CLIP = 8, 4, 0.1, 1.0
#: Tensor, expert and expert-tensor parallel sizes, on two ranks.
LAYOUTS = {
    "TP 2": (2, 1, 2),
    "TP 2, EP 2": (2, 2, 1),
    "TP 2, experts whole": (2, 1, 1),
    "EP 2": (1, 2, 1),
    "DP 2": (1, 1, 1),
}
NAMES = {
    "megatron-core-attention-sink-norm": "sinks",
    "megatron-core-duplicated-norm": "duplicated",
    "megatron-core-grouped-experts-norm": "experts",
}


made: dict[str, int] = {}
"""The sizes whose groups there are."""


def layers(kind: str, config: Any, experts: int) -> torch.nn.ModuleDict:
    """A native layer that is divided, and TransformerEngine's of this kind, with biases; of attention both."""
    initial: Any = {"init_method": torch.nn.init.normal_, "config": config, "skip_bias_add": False}
    divided = ColumnParallelLinear(HIDDEN, HIDDEN, bias=True, **initial)
    if kind == "sinks":
        kinds = {"sinks": DotProductAttention, "sinks_te": transformer_engine.TEDotProductAttention}
        attentions = {name: make(config, 1, AttnMaskType.causal, "self") for name, make in kinds.items()}
        for sinks in attentions["sinks_te"].parameters():
            torch.nn.init.zeros_(sinks)  # a checkpoint's, or its caller's: TransformerEngine leaves what was in memory
        return torch.nn.ModuleDict({"divided": divided, **attentions})
    initial["bias"] = config.add_bias_linear
    if kind == "duplicated":
        from mcore_bridge.tuners.lora import LoraParallelLinear

        more: Any = {"skip_weight_param_allocation": False}
        whole = transformer_engine.TELinear(HIDDEN, 4, parallel_mode="duplicated", **more, **initial)
        adapted = {"divided": divided, "whole": whole}
        # Adapters of mcore-bridge: of such a layer, and of an expert that is not grouped with others.
        base = transformer_engine.TELinear(HIDDEN, 4, parallel_mode="duplicated", **more, **initial)
        adapted["adapted"] = LoraParallelLinear(base, "default", r=2)
        if experts < EXPERTS:
            expert: Any = {"is_expert": True, "gather_output": False, **more}
            base = transformer_engine.TEColumnParallelLinear(HIDDEN, 16, **expert, **{**initial, "bias": False})
            base.is_expert = True  # as ModelLoader._set_linear_is_expert of mcore-bridge does
            adapted["expert"] = LoraParallelLinear(base, "default", r=2)
        return torch.nn.ModuleDict(adapted)
    first = transformer_engine.TEColumnParallelGroupedLinear(experts, HIDDEN, 16, is_expert=True, **initial)
    second = transformer_engine.TERowParallelGroupedLinear(experts, 16, HIDDEN, is_expert=True, **initial)
    return torch.nn.ModuleDict({"divided": divided, "first": first, "second": second})


def marked_by_users(kind: str, layout: str) -> dict[str, Any]:
    """What a user's class that marks its sinks or experts itself has, as Megatron's own layers mark theirs."""

    def marking(base: type) -> type:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            base.__init__(self, *args, **kwargs)  # type: ignore[misc]
            for parameter in self.parameters():
                set_tensor_model_parallel_attributes(parameter, True, 0, 1)

        return type(f"My{base.__name__}", (base,), {"__init__": init})

    config = configuration(kind, layout, "learnable" if kind == "sinks" else "vanilla")
    if kind == "sinks":
        own = {
            base.__name__: marking(base)(config, 1, AttnMaskType.causal, "self")
            for base in (DotProductAttention, transformer_engine.TEDotProductAttention)
        }
    else:
        initial: Any = {"init_method": torch.nn.init.normal_, "config": config, "skip_bias_add": False, "bias": False}
        experts = marking(transformer_engine.TEColumnParallelGroupedLinear)
        own = {"first": experts(EXPERTS // 2, HIDDEN, 16, is_expert=True, **initial)}
    return marks(torch.nn.ModuleDict(own))


def place(name: str, layout: str) -> str:
    """What tells a parameter of this rank from all others of the whole model; equal where ranks have the same one."""
    tensor, expert, expert_tensor = LAYOUTS[layout]
    rank = torch.distributed.get_rank()
    if name.startswith(("divided", "sinks", "adapted.lora_B")):
        return f"{name} of {rank if tensor > 1 else 0}"
    if name.startswith(("whole", "adapted")):
        return name
    return f"{name} of {rank if expert * expert_tensor > 1 else 0}"  # experts of others, or another part of the same


def gradient(where: str, shape: torch.Size) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(where.encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float32)


def marks(model: torch.nn.Module) -> dict[str, Any]:
    """What is said of each parameter's division over tensor-parallel ranks."""
    names = ("tensor_model_parallel", "partition_dim", "partition_stride")
    return {
        name: {mark: getattr(parameter, mark) for mark in names if hasattr(parameter, mark)}
        for name, parameter in model.named_parameters()
    }


def configuration(kind: str, layout: str, softmax: str) -> TransformerConfig:
    """Of a layout, whose groups are made."""
    tensor, expert, expert_tensor = LAYOUTS[layout]
    sizes = {
        "tensor_model_parallel_size": tensor,
        "expert_model_parallel_size": expert,
        "expert_tensor_parallel_size": expert_tensor,
    }
    if made != sizes:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(**sizes)
        made.update(sizes)
    model_parallel_cuda_manual_seed(1)
    return TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=8,
        softmax_type=softmax,
        num_moe_experts=EXPERTS if kind == "experts" or expert > 1 else None,
        moe_ffn_hidden_size=16 if kind == "experts" or expert > 1 else None,
        sequence_parallel=tensor > 1,
        use_cpu_initialization=True,
        add_bias_linear=expert_tensor == 1,  # with divided experts Megatron refuses biases
        **sizes,
    )


def step(kind: str, layout: str, distributed: bool, softmax: str = "vanilla") -> dict[str, Any]:
    """One step of SGD; the numbers of the whole model come from all ranks, by hand."""
    expert = LAYOUTS[layout][1]
    config = configuration(kind, layout, softmax)
    model = layers(kind, config, EXPERTS // expert)
    marked = marks(model)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed)
    chunk = DistributedDataParallel(config, ddp, model)
    settings: dict[str, Any] = {
        "lr": RATE,
        "weight_decay": 0.0,
        "clip_grad": CLIP,
        "use_distributed_optimizer": distributed,
    }
    # The distributed one takes no other than Adam, whose steps do not show how the gradient was scaled.
    settings["optimizer"] = "adam" if distributed else "sgd"
    optimizer = get_megatron_optimizer(OptimizerConfig(**settings), [chunk])
    chunk.zero_grad_buffer()
    parameters = dict(model.named_parameters())
    before = {name: parameter.detach().double().clone() for name, parameter in parameters.items()}
    places = {name: place(name, layout) for name in parameters}
    gradients = {name: gradient(places[name], parameter.shape) for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        parameter.main_grad.copy_(gradients[name])
    _, norm, _ = optimizer.step()
    everywhere: list[Any] = [None] * torch.distributed.get_world_size()
    squares = {places[name]: float(one.double().square().sum()) for name, one in gradients.items()}
    torch.distributed.all_gather_object(everywhere, squares)
    exact = sum({place: square for rank in everywhere for place, square in rank.items()}.values()) ** 0.5
    found = {"norm": float(norm), "exact": exact}
    if kind == "sinks":
        found["marks"] = marked
    if kind == "duplicated":
        found["adapters"] = {name: type(one).__name__ for name, one in model.named_modules() if "lora_" in name}
    if not distributed:
        scale = RATE * min(1.0, CLIP / exact)
        moved = {name: before[name] - scale * gradients[name].double() for name in parameters}
        found["off"] = max(float((parameters[name].double() - moved[name]).abs().max()) for name in parameters)
    return found


def main() -> None:
    parser = states.parser()
    parser.add_argument("--patch", choices=NAMES, required=True)
    parser.add_argument("cases", nargs="+")
    options = parser.parse_args()
    torch.distributed.init_process_group("gloo")
    kind = NAMES[options.patch]

    def observe(cases: list[str]) -> dict[str, Any]:
        softmax = "learnable" if kind == "sinks" else "vanilla"
        found: dict[str, Any] = {}
        for case in cases:
            layout = case.removesuffix(", distributed")
            found[case] = step(kind, layout, layout != case, softmax)
        if kind != "duplicated":
            layout = "TP 2" if kind == "sinks" else "TP 2, EP 2"
            with contextlib.suppress(AssertionError):  # TransformerEngine 2.11 has marked them before
                found["a user's"] = {"marks": marked_by_users(kind, layout)}
        others = ("off-by-one", "vanilla") if kind == "sinks" else ()
        return {**found, **{f"TP 2, {other}": step(kind, "TP 2", False, other) for other in others}}

    states.report_cases(options.patch, observe, options.cases, options.out)
