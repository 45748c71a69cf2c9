"""Gradients of a Gated DeltaNet that tensor-parallel ranks share: the real megatron-core, gloo.

``--out FOLDER --tp SIZE [--sequence]``. A step as released, with the patch and after a revert. Each rank writes how far
the gradients of its parameters are from the whole layer's, in float64 and without megatron-core.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from tests.harness import megatron_on_cpu

torch.set_num_threads(1)
megatron_on_cpu.install()

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

import rlhf_patches
from tests.harness import gated_delta_net_on_cpu
from tests.harness.token_reference import counted_all_reduces

PATCH = "megatron-core-gdn-norm-gradient"
TOKENS, BATCH, HIDDEN = 12, 2, 32
KEYS, VALUES, WIDTH, KERNEL = 2, 4, 8, 4  # heads, of which keys' are repeated; numbers of one; taps of the convolution
EPS = 1e-6
SECTIONS = [KEYS * WIDTH, KEYS * WIDTH, VALUES * WIDTH, VALUES * WIDTH, VALUES, VALUES]
"""Rows of the projection: queries, keys, values, gate, beta, alpha. The convolution has the first three."""
Parameters = dict[str, torch.Tensor]


class Norm:
    """Torch's in place of TransformerEngine's RMSNorm, which marks its weight so."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float) -> Any:
        norm = torch.nn.RMSNorm(hidden_size, eps)
        norm.weight.sequence_parallel = config.sequence_parallel
        return norm


class SummingNorm(torch.nn.Module):
    """A user's repair: backward adds up the gradient of its weight."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return summing(hidden, self.weight)


def summing(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(hidden, weight.shape, copy_to_tensor_model_parallel_region(weight), EPS)


def layer_that_sums(base: Any) -> type:
    """The same in a class that derives from Megatron's."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, *args, **kwargs)
        weight = self.out_norm.weight
        self.out_norm.forward = lambda hidden: summing(hidden, weight)

    return type("SummingDeltaNet", (base,), {"__init__": init, "__module__": __name__})


def add_up(gradient: torch.Tensor) -> torch.Tensor:
    """And in a hook."""
    total = gradient.clone()
    torch.distributed.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
    return total


WORKAROUNDS = ("norm", "layer", "hook")


class Other(MegatronModule):
    """A layer with a norm of the same name, which ranks compute alike."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.out_norm = Norm(config, HIDDEN, EPS)


class Model(MegatronModule):
    """A Gated DeltaNet and another layer, named as in a model."""

    def __init__(self, config: TransformerConfig, layers: Any, workaround: str | None) -> None:
        super().__init__(config)
        norm = SummingNorm if workaround == "norm" else Norm
        submodules = layers.GatedDeltaNetSubmodules(ColumnParallelLinear, norm, RowParallelLinear)
        layer = layer_that_sums(layers.GatedDeltaNet) if workaround == "layer" else layers.GatedDeltaNet
        groups = ProcessGroupCollection.use_mpu_process_groups()
        self.layers = torch.nn.ModuleList(
            [layer(config, submodules, layer_number=1, pg_collection=groups), Other(config)]
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        delta_net, other = self.layers
        output, _ = delta_net(hidden, None)
        return other.out_norm(output)


# ------------------------------------------------------------------------------------- the whole layer, in float64


def whole() -> Parameters:
    """Parameters of the model before it is divided."""
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "layers.0.dt_bias": (VALUES,),
        "layers.0.A_log": (VALUES,),
        "layers.0.in_proj.weight": (sum(SECTIONS), HIDDEN),
        "layers.0.conv1d.weight": (sum(SECTIONS[:3]), 1, KERNEL),
        "layers.0.out_norm.weight": (WIDTH,),
        "layers.0.out_proj.weight": (HIDDEN, VALUES * WIDTH),
        "layers.1.out_norm.weight": (HIDDEN,),
    }
    return {name: torch.randn(shape, generator=generator).double() * 0.3 for name, shape in shapes.items()}


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states, and the gradient of the model's output."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weights = (torch.randn(TOKENS, BATCH, HIDDEN, generator=generator) for _ in range(2))
    return hidden, weights


def normed(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return hidden / (hidden.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def computed(parameters: Parameters, hidden: torch.Tensor) -> torch.Tensor:
    """The delta rule token by token, as it is written in its paper."""
    p = {name.partition(".")[2]: parameter for name, parameter in parameters.items()}
    mixed = F.linear(hidden.double(), p["0.in_proj.weight"]).permute(1, 2, 0)  # batch, rows, tokens
    rows = sum(SECTIONS[:3])
    taps = F.pad(mixed[:, :rows], (KERNEL - 1, 0))
    convolved = F.silu(F.conv1d(taps, p["0.conv1d.weight"], groups=rows))
    sections = torch.cat([convolved, mixed[:, rows:]], 1).split(SECTIONS, 1)
    query, key, value, gate = (section.unflatten(1, (-1, WIDTH)) for section in sections[:4])
    query, key = (heads / (heads.square().sum(2, keepdim=True) + EPS).sqrt() for heads in (query, key))
    query, key = (heads.repeat_interleave(VALUES // KEYS, 1) for heads in (query, key))
    beta = sections[4].sigmoid()
    kept = (-p["0.A_log"].exp()[:, None] * F.softplus(sections[5] + p["0.dt_bias"][:, None])).exp()
    state = hidden.new_zeros(BATCH, VALUES, WIDTH, WIDTH, dtype=torch.float64)
    outputs = []
    for token in range(TOKENS):
        q, k, v = (heads[..., token] for heads in (query, key, value))
        state = state * kept[:, :, token, None, None]
        found = torch.einsum("bhk,bhkv->bhv", k, state)
        state = state + torch.einsum("bhk,bhv->bhkv", k, (v - found) * beta[:, :, token, None])
        outputs.append(torch.einsum("bhk,bhkv->bhv", q * WIDTH**-0.5, state))
    heads = torch.stack(outputs)  # tokens, batch, heads, width
    gated = normed(heads, p["0.out_norm.weight"]) * F.silu(gate.permute(3, 0, 1, 2))
    return normed(F.linear(gated.flatten(2), p["0.out_proj.weight"]), p["1.out_norm.weight"])


def reference(batches: int) -> Parameters:
    """The gradient, the mean over the batches of data-parallel ranks."""
    parameters = {name: parameter.requires_grad_() for name, parameter in whole().items()}
    for seed in range(batches):
        hidden, weights = batch(seed)
        (computed(parameters, hidden) * weights.double()).sum().div(batches).backward()
    return {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}


def part(name: str, values: torch.Tensor) -> torch.Tensor:
    """What this rank has of a parameter, or of its gradient."""
    rank, ranks = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    if "out_norm" in name:
        return values
    if "out_proj" in name:
        return values.chunk(ranks, 1)[rank]
    sizes = {"in_proj": SECTIONS, "conv1d": SECTIONS[:3]}.get(name.split(".")[2], [values.shape[0]])
    return torch.cat([section.chunk(ranks)[rank] for section in values.split(sizes)])


# ------------------------------------------------------------------------------------- megatron-core's


def make_model(sequence: bool, workaround: str | None) -> Any:
    """Within megatron-core's DistributedDataParallel."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=VALUES,
        normalization="RMSNorm",
        layernorm_epsilon=EPS,
        activation_func=F.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        deterministic_mode=True,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        sequence_parallel=sequence,
        linear_conv_kernel_dim=KERNEL,
        linear_key_head_dim=WIDTH,
        linear_value_head_dim=WIDTH,
        linear_num_key_heads=KEYS,
        linear_num_value_heads=VALUES,
    )
    model = Model(config, gated_delta_net_on_cpu.install(), workaround)
    parameters = whole()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(part(name, parameters[name]))
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model)


def step(sequence: bool, frozen: bool = False, workaround: str | None = None) -> dict[str, Any]:
    """Forward, backward and what Megatron's trainers do to the gradients before the optimizer's step."""
    model = make_model(sequence, workaround)
    delta_net = model.module.layers[0]
    if workaround == "hook":
        delta_net.out_norm.weight.register_hook(add_up)
    if frozen:
        delta_net.out_norm.weight.requires_grad_(False)
    ranks = parallel_state.get_data_parallel_world_size()
    hidden, weights = batch(parallel_state.get_data_parallel_rank())
    if sequence:
        rank, size = delta_net.pg_collection.tp.rank(), delta_net.pg_collection.tp.size()
        hidden, weights = (values.chunk(size)[rank] for values in (hidden, weights))
    (model(hidden) * weights).sum().backward()
    with counted_all_reduces() as sizes:
        finalize_model_grads([model])
    exact = reference(ranks)
    found: dict[str, Any] = {"errors": {}, "bits": {}, "all-reduced": sizes}
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad:
            wanted = part(name, exact[name])
            gradient = parameter.main_grad.double()
            found["errors"][name] = ((gradient - wanted).norm() / wanted.norm()).item()
            found["bits"][name] = gradient.flatten().tolist()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tp", type=int, required=True)
    parser.add_argument("--sequence", action="store_true")
    options = parser.parse_args()
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=options.tp)
    model_parallel_cuda_manual_seed(1)
    report: dict[str, Any] = {"version": importlib.metadata.version("megatron-core")}
    for state in ("before", "after", "reverted"):
        if state == "after":
            rlhf_patches.apply(only=PATCH)
            report["row"] = rlhf_patches.report()[PATCH].to_dict()
        elif state == "reverted":
            rlhf_patches.revert()
        report[state] = step(options.sequence)
        if state in ("before", "after"):
            report[state]["frozen"] = step(options.sequence, frozen=True)
            if options.tp > 1 and not options.sequence:
                report[state]["workarounds"] = {name: step(False, workaround=name) for name in WORKAROUNDS}
    (options.out / f"rank{os.environ.get('RANK', '0')}.json").write_text(json.dumps(report))
