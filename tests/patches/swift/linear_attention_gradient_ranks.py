"""Gradients of ms-swift's Gated DeltaNet on tensor-parallel ranks, against transformers' own on one, in float64.

``--out FOLDER [SP]``; each rank has a part of the sequence with SP, and all of it without.
"""

from __future__ import annotations

import functools
import importlib
from types import SimpleNamespace
from typing import Any

import torch

from rlhf_patches.proving import states
from tests.patches.swift import null_ref_context_ranks

torch.set_num_threads(1)
NAME = "swift-linear-attention-gradient"
TOKENS, ROWS, HIDDEN = 12, 2, 16


def class_of_release() -> type:
    try:
        module = importlib.import_module("swift.megatron.model.gpts.qwen3_next")
    except ModuleNotFoundError:
        module = importlib.import_module("swift.megatron.model.gpt.qwen3_next")
    found: type = module.Qwen3NextGatedDeltaNet
    return found


def config(arguments: SimpleNamespace) -> Any:
    from megatron.core.transformer import TransformerConfig

    found: Any = TransformerConfig(num_layers=1, hidden_size=HIDDEN, num_attention_heads=2)
    found.tensor_model_parallel_size = getattr(arguments, "tensor_model_parallel_size", 1)
    found.sequence_parallel = getattr(arguments, "sequence_parallel", False)
    sizes = {"num_value_heads": 4, "num_key_heads": 2, "key_head_dim": 4, "value_head_dim": 4, "conv_kernel_dim": 3}
    more = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "dtype": torch.float32, "args": arguments}
    for name, value in {**{f"linear_{name}": size for name, size in sizes.items()}, **more}.items():
        setattr(found, name, value)  # writes: a configuration of this test's own
    return found


def fill(layer: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in layer.parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5
            parameter.copy_(values + (1 if parameter.dim() == 1 else 0))


def numbers() -> list[torch.Tensor]:
    """The hidden states ``[tokens, rows, hidden]``, and what each output weighs in the loss."""
    generator = torch.Generator().manual_seed(8)
    return [torch.randn(TOKENS, ROWS, HIDDEN, generator=generator, dtype=torch.float64) for _ in range(2)]


class Masked(torch.nn.Module):
    """A projection with the dropout of a rank: what LoRA's is behind a mixture, whose ranks have drawn apart."""

    def __init__(self, projection: torch.nn.Module, rank: int) -> None:
        super().__init__()
        self.projection, self.rank = projection, rank

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        drawn = torch.rand(given.shape, generator=torch.Generator().manual_seed(20 + self.rank), dtype=torch.float64)
        found: torch.Tensor = self.projection(given * (drawn > 0.2).to(given) / 0.8)
        return found


def exact_with_masks(ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean of the ranks' outputs, each with its own mask, and the gradient of the hidden states."""
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    given, weights = numbers()
    given.requires_grad_()
    outputs = []
    for rank in range(ranks):
        layer = Qwen3NextGatedDeltaNet(config(SimpleNamespace()), 0).double()
        fill(layer)
        layer.in_proj_qkvz = Masked(layer.in_proj_qkvz, rank)
        outputs.append(layer(given.transpose(0, 1)).transpose(0, 1))
    mean = torch.stack(outputs).mean(0)
    (mean * weights).sum().backward()
    assert given.grad is not None
    return mean.detach(), given.grad


def with_masks(arguments: SimpleNamespace, own: slice, rank: int, ranks: int) -> dict[str, Any]:
    """How far this rank's output and gradient of the states are off, and their bits."""
    layer = class_of_release()(config(arguments), None, 0).float()
    fill(layer)
    layer.in_proj_qkvz = Masked(layer.in_proj_qkvz, rank)
    given, weights = (one[own].float() for one in numbers())
    given.requires_grad_()
    output, _ = layer(given)
    (output * weights).sum().backward()
    off = [
        ((found.double() - right[own]).norm() / right[own].norm()).item()
        for found, right in zip((output.detach(), given.grad), exact_with_masks(ranks), strict=True)
    ]
    return {"off": off, "bits": output.flatten().tolist() + given.grad.flatten().tolist()}


@functools.cache
def exact() -> dict[str, torch.Tensor]:
    """Of transformers' own layer, asked before a user replaces its forward."""
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    layer = Qwen3NextGatedDeltaNet(config(SimpleNamespace()), 0).double()
    fill(layer)
    given, weights = numbers()
    given.requires_grad_()
    (layer(given.transpose(0, 1)).transpose(0, 1) * weights).sum().backward()
    return {"states": given.grad, **{name: one.grad for name, one in layer.named_parameters()}}


def marked(arguments: SimpleNamespace, own: slice) -> float:
    """With a user's own repair, Megatron's way to add up gradients: how far they are off when it has done so."""
    layer = class_of_release()(config(arguments), None, 0).float()
    fill(layer)
    given, weights = (one[own].float() for one in numbers())
    for parameter in layer.parameters():
        parameter.sequence_parallel, parameter.average_gradients_across_tp_domain = 1, False
    (layer(given)[0] * weights).sum().backward()
    off = 0.0
    for name, of in exact().items():
        if name != "states":
            found = dict(layer.named_parameters())[name].grad
            torch.distributed.all_reduce(found)
            off = max(off, ((found.double() - of).norm() / of.norm()).item())
    return off


class Times(torch.autograd.Function):
    """The tensor; what goes back is multiplied."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * ctx.factor, None


def by_users(arguments: SimpleNamespace, own: slice, ranks: int) -> dict[str, float]:
    """With repairs of a user's own, how far all gradients are off: around the layer, and in the place of Megatron's."""
    kind: Any = class_of_release()
    module: Any = importlib.import_module(kind.__module__)
    divided = hasattr(module, "reduce_scatter_to_sequence_parallel_region")  # from 3.12.4 on
    names = ("gather_from_sequence_parallel_region", f"{'reduce_' * divided}scatter_to_sequence_parallel_region")
    real = (kind.forward, *(getattr(module, name) for name in names))
    # To 3.12.3 the weights are right; from 3.12.4 on they have a part, and what goes back is right.
    into, out = (1 / ranks, ranks) if divided else (1 / ranks, 1)

    def forward(self: Any, states: torch.Tensor, **more: Any) -> Any:
        found, bias = real[0](self, Times.apply(states, into), **more)
        return Times.apply(found, out), bias

    def gather(states: torch.Tensor) -> Any:
        return Times.apply(real[1](states), into)

    def scatter(found: torch.Tensor) -> Any:
        return real[2](Times.apply(found, out))

    found = {}
    for name, of in {"forward": (forward, *real[1:]), "mappings": (real[0], gather, scatter)}.items():
        kind.forward = of[0]
        for one, function in zip(names, of[1:], strict=True):
            setattr(module, one, function)
        try:
            found[name] = off_by(arguments, own)
        finally:
            kind.forward = real[0]
            for one, function in zip(names, real[1:], strict=True):
                setattr(module, one, function)

    def hooked(layer: torch.nn.Module) -> None:
        layer.register_forward_pre_hook(lambda _, given: (Times.apply(given[0], into), *given[1:]))
        layer.register_forward_hook(lambda _, given, made: (Times.apply(made[0], out), *made[1:]))

    def weighed(layer: torch.nn.Module) -> None:
        for parameter in layer.parameters():
            parameter.register_hook(lambda gradient: gradient * ranks)

    def weighed_later(layer: torch.nn.Module) -> None:
        for parameter in layer.parameters():
            parameter.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", one.grad * ranks))

    found["hooks"] = off_by(arguments, own, hooked)
    if divided:
        found.update({one.__name__: off_by(arguments, own, one) for one in (weighed, weighed_later)})
    base: Any = next(each for each in kind.__mro__ if each.__module__.startswith("transformers."))
    next_one = base.forward

    def around(self: Any, hidden_states: torch.Tensor, *args: Any, **more: Any) -> Any:
        return Times.apply(next_one(self, Times.apply(hidden_states, into), *args, **more), out)

    base.forward = around
    try:
        found["transformers"] = off_by(arguments, own)
    finally:
        base.forward = next_one
    return found


def off_by(arguments: SimpleNamespace, own: slice, prepare: Any = lambda layer: None) -> float:
    """The largest of the errors."""
    layer = class_of_release()(config(arguments), None, 0).float()
    fill(layer)
    prepare(layer)
    given, weights = (one[own].float() for one in numbers())
    given.requires_grad_()
    (layer(given)[0] * weights).sum().backward()
    found = {name: one.grad for name, one in layer.named_parameters()} | {"states": given.grad}
    off = 0.0
    for name, of in exact().items():
        of = of[own] if name == "states" else of
        off = max(off, ((found[name].double() - of).norm() / of.norm()).item())
    return off


def observe(sequence_parallel: bool, more: bool) -> dict[str, Any]:
    """What the layer gives, and with ``more`` what it gives with masks, and with repairs of a user's own."""
    from megatron.core import parallel_state

    ranks, rank = (getattr(parallel_state, f"get_tensor_model_parallel_{of}")() for of in ("world_size", "rank"))
    arguments = SimpleNamespace(sequence_parallel=sequence_parallel, tensor_model_parallel_size=ranks, packing=False)
    null_ref_context_ranks.Args.current = arguments  # which ms-swift 3 asks, and 4 its configuration
    layer = class_of_release()(config(arguments), None, 0).float()
    fill(layer)
    own = slice(None)
    if sequence_parallel:
        own = slice(rank * TOKENS // ranks, (rank + 1) * TOKENS // ranks)
    given, weights = (one[own].float() for one in numbers())
    given.requires_grad_()
    output, _ = layer(given)
    (output * weights).sum().backward()
    right = exact()
    off: dict[str, float] = {}
    for name, of in right.items():
        found = given.grad if name == "states" else dict(layer.named_parameters())[name].grad
        of = of[own] if name == "states" else of
        off[name] = ((found.double() - of).norm() / of.norm()).item()
    report = {"off": off, "output": output.flatten().tolist(), "bits": given.grad.flatten().tolist()}
    if not sequence_parallel or not more:
        return report
    report |= {"masks": with_masks(arguments, own, rank, ranks), "marked": marked(arguments, own)}
    return {**report, "users": by_users(arguments, own, ranks)}


def main() -> None:
    parser = states.parser()
    parser.add_argument("sequence", nargs="?")
    options = parser.parse_args()
    null_ref_context_ranks.load_megatron()
    # What ms-swift 3 reads while groups are made.
    null_ref_context_ranks.Args.current = SimpleNamespace(distributed_timeout_minutes=2, context_parallel_size=1)
    torch.distributed.init_process_group("gloo")
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(torch.distributed.get_world_size())
    class_of_release()
    of_states = iter((True, True, False))
    states.report(NAME, lambda: observe(options.sequence == "SP", next(of_states)), options.out)
